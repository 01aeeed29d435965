package sample

// change is what a logit was.
type change struct {
	id  int32
	old float32
}

// promptMark is the bit of a mark that says that the token is in the prompt.
const promptMark = 1 << 31

// adjust applies biases and penalties.
func (s *Sampler) adjust(logits []float32, p *Params, at Place) {
	s.undo = s.undo[:0]
	for id, b := range p.Bias {
		if id >= 0 && int(id) < len(logits) {
			s.undo = append(s.undo, change{id, logits[id]})
			logits[id] += b
		}
	}
	repeats := p.Repetition != 0 && p.Repetition != 1
	if !repeats && p.Frequency == 0 && p.Presence == 0 {
		return
	}
	s.mark(len(logits), at, repeats)
	for _, id := range s.ids {
		m := s.marks[id]
		s.marks[id] = 0
		x := logits[id]
		s.undo = append(s.undo, change{id, x})
		if repeats && x > 0 {
			x /= p.Repetition
		} else if repeats {
			x = float32(x * p.Repetition)
		}
		if n := m &^ promptMark; n > 0 {
			x -= float32(p.Frequency * float32(n))
			x -= p.Presence
		}
		logits[id] = x
	}
}

// mark counts the tokens before the place.
func (s *Sampler) mark(vocab int, at Place, prompt bool) {
	if len(s.marks) < vocab {
		s.marks = make([]uint32, vocab)
	}
	s.ids = s.ids[:0]
	if prompt {
		for _, id := range at.Prompt {
			if s.marks[id] == 0 {
				s.ids = append(s.ids, id)
			}
			s.marks[id] |= promptMark
		}
	}
	for _, id := range at.Generated {
		if s.marks[id] == 0 {
			s.ids = append(s.ids, id)
		}
		s.marks[id]++
	}
}

// restore takes back what adjust did.
func (s *Sampler) restore(logits []float32) {
	for i := len(s.undo) - 1; i >= 0; i-- {
		logits[s.undo[i].id] = s.undo[i].old
	}
}
