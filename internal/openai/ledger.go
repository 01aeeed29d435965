package openai

// Ledger keeps which tokens a client has been given, from the events of the leg that serves it. A worker announces
// tokens before the data event with their text, and a leg may die between the two: announced tokens count once the next
// event has arrived, which is that data event, or shows that there is none because the text is held back.
//
// Observe is to be called with each event, data events after they have been forwarded.
type Ledger struct {
	tokens  []int32
	pending []int32
	role    bool
}

// Observe takes one event of the leg that owns the stream.
func (l *Ledger) Observe(ev Event) error {
	l.tokens = append(l.tokens, l.pending...)
	l.pending = l.pending[:0]
	switch ev.Kind {
	case EventTokens:
		var err error
		l.pending, err = AppendTokens(l.pending, ev.Arg)
		return err
	case EventData:
		l.role = true
	}
	return nil
}

// NextLeg forgets what a dead leg announced and did not deliver.
func (l *Ledger) NextLeg() { l.pending = l.pending[:0] }

// Resume returns the tokens for KVParams.Resume: nil as long as the client has been given nothing at all.
func (l *Ledger) Resume() []int32 {
	if !l.role && len(l.tokens) == 0 {
		return nil
	}
	return append([]int32{}, l.tokens...)
}

// Count returns how many tokens the client has been given.
func (l *Ledger) Count() int { return len(l.tokens) }
