package tokenize

import (
	"slices"
	"strings"

	"github.com/headrace/headrace/internal/bpe"
	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/router/tokens"
)

const (
	// triesMax bounds the prefixes of a conversation that are tried before all of it is rendered.
	triesMax = 3
	// checksFirst and checkEvery say which answers out of the cache are compared with what rendering everything gives.
	checksFirst = 4
	checkEvery  = 4096
)

// appendCached takes what is known of the conversation from the cache, and remembers what it was asked.
func (t *Tokenizer) appendCached(dst []uint32, f *fields, in chat.Input, o flags, s *scratch) ([]uint32, error) {
	day := ""
	if t.dated {
		day = in.Now.Format("2006-01-02")
	}
	t.chainKeys(f, day, s)
	start, n := len(dst), len(s.items)
	for try := 0; try < triesMax; try++ {
		k, e, parts := t.cache.find(s.keys, n, s.parts)
		if e == nil {
			break
		}
		s.parts = parts
		out, ok, err := t.extend(dst, k, e, in, day, o, s)
		if err != nil {
			return out, err
		}
		if ok {
			if hits := t.cache.hits.Add(1); hits <= checksFirst || hits%checkEvery == 0 {
				return t.check(out, start, in, o, s)
			}
			return out, nil
		}
		n = k - 1
	}
	t.cache.misses.Add(1)
	return t.appendCold(dst, in, day, o, s)
}

// chainKeys computes the keys of all prefixes of the conversation.
func (t *Tokenizer) chainKeys(f *fields, day string, s *scratch) {
	k := chain(0, t.cache.hash(f.tools))
	k = chain(chain(k, t.cache.hash(f.kwargs)), t.cache.hash(f.effort))
	k = chain(k, t.cache.hash([]byte(day)))
	s.keys = s.keys[:0]
	for _, raw := range s.items {
		k = chain(k, t.cache.hash(raw))
		s.keys = append(s.keys, k)
	}
}

// check compares an answer out of the cache, out[start:] behind what lies apart, with what rendering everything gives. If they
// differ the cache is given up: the template does what no probe of it has done.
func (t *Tokenizer) check(out []uint32, start int, in chat.Input, o flags, s *scratch) ([]uint32, error) {
	t.cache.checks.Add(1)
	whole, err := t.appendWhole(nil, in, o, s)
	if err != nil || slices.Equal(whole, append(joinParts(nil, s.known), out[start:]...)) {
		return out, err
	}
	t.cache.wrong.Add(1)
	t.cache.off.Store(true)
	s.known = nil
	return append(out[:start], whole...), nil
}

// begin appends the tokens of the node that a prompt goes on from, which are in s.parts, or leaves them apart.
func (s *scratch) begin(dst []uint32) []uint32 {
	if s.apart {
		s.known = s.parts
		return dst
	}
	return joinParts(dst, s.parts)
}

// extend answers from the node of the first k messages. ok is false where the node is of no use for this conversation.
// The node's tokens are in s.parts.
func (t *Tokenizer) extend(dst []uint32, k int, e *node, in chat.Input, day string, o flags, s *scratch) ([]uint32, bool, error) {
	if k == len(s.items) {
		dst, ok := t.again(dst, e, in, day, o, s)
		return dst, ok, nil
	}
	s.text = append(s.text[:0], e.tail...)
	if !t.fillIn(in, day, e.stub, s.items[k:], o.generate, s) {
		s.json = s.json[:0]
		if err := t.readMessages(s, s.items[k:]); err != nil {
			return dst, false, err
		}
		text, ok := t.behind(in, day, e.stub, s.json, o.generate, s)
		if !ok {
			return dst, false, nil
		}
		s.text = append(s.text, text...)
	}
	dst = s.begin(dst)
	dst = t.store(dst, len(s.items), e, e.inside, foldAll(e.stub, s.kinds), in, day, o, s)
	return dst, true, nil
}

// again answers for a conversation that was asked before: a retry, or another answer to the same question.
func (t *Tokenizer) again(dst []uint32, e *node, in chat.Input, day string, o flags, s *scratch) ([]uint32, bool) {
	if o.generate && e.asked {
		return append(s.begin(dst), e.final...), true
	}
	prompt := ""
	if o.generate {
		stub := t.stubOf(in, day, e.stub, s.name[:0])
		if !stub.ok || strings.Contains(stub.prompt, marker) {
			return dst, false
		}
		prompt = stub.prompt
	}
	s.text = append(append(s.text[:0], e.tail...), prompt...)
	return t.bpe.Encode(s.begin(dst), view(s.text), bpe.Options{Inside: e.inside}), true
}

// store appends the tokens of s.text, the rendered end of a conversation of n messages, and remembers them behind those
// of the node it goes on from, which may be nil.
func (t *Tokenizer) store(dst []uint32, n int, from *node, inside bool, stub []kind, in chat.Input, day string, o flags, s *scratch) []uint32 {
	text := view(s.text)
	main := text
	if o.generate && stub != nil {
		asked := t.stubOf(in, day, stub, s.name[:0])
		if !asked.ok || !strings.HasSuffix(text, asked.prompt) || strings.Contains(asked.prompt, marker) {
			stub = nil
		} else {
			main = text[:len(text)-len(asked.prompt)]
		}
	}
	if stub == nil {
		return t.bpe.Encode(dst, text, bpe.Options{Inside: inside})
	}
	var cut bpe.Cut
	s.ids, cut = t.bpe.EncodeCut(s.ids[:0], main, bpe.Options{Inside: inside})
	more := s.ids[:cut.Tokens]
	e := &node{tail: strings.Clone(main[cut.Text:]), inside: inside || cut.Text > 0, stub: stub}
	dst = append(dst, more...)
	if o.generate {
		e.final, e.asked = t.bpe.Encode(nil, text[cut.Text:], bpe.Options{Inside: e.inside}), true
		dst = append(dst, e.final...)
	} else {
		dst = append(dst, s.ids[cut.Tokens:]...)
	}
	t.cache.add(s.keys, n, from, s.parts, more, e)
	return dst
}

// appendCold renders all of a conversation and remembers it, and what others begin with too: its system message on its
// own, and all but its last message.
func (t *Tokenizer) appendCold(dst []uint32, in chat.Input, day string, o flags, s *scratch) ([]uint32, error) {
	text, err := t.renderAll(in, o, s)
	if err != nil {
		return dst, err
	}
	stub := foldAll(nil, s.kinds)
	if len(s.items) > 1 && (s.kinds[0].role == "system" || s.kinds[0].role == "developer") {
		t.storeSystem(text, in, s)
	}
	if dst, ok := t.appendInTwo(dst, text, in, day, o, s); ok {
		return dst, nil
	}
	s.text = append(s.text[:0], text...)
	s.parts = s.parts[:0]
	return t.store(dst, len(s.items), nil, false, stub, in, day, o, s), nil
}

// appendInTwo does appendCold's work for a conversation that was rendered as whole, and remembers all but its last message
// on the way: the same questions are asked about many things, and many questions about the same. ok is false where the
// text of the last message cannot be told from that of the others.
func (t *Tokenizer) appendInTwo(dst []uint32, whole string, in chat.Input, day string, o flags, s *scratch) ([]uint32, bool) {
	last := len(s.items) - 1
	if last < 1 {
		return dst, false
	}
	stub := foldAll(nil, s.kinds[:last])
	if stub == nil {
		return dst, false
	}
	message, _, err := t.appendMessage(s.json[:0], s.items[last])
	if err != nil {
		return dst, false
	}
	s.json = message
	text, ok := t.behind(in, day, stub, message, o.generate, s)
	if !ok || !strings.HasSuffix(whole, text) {
		return dst, false
	}
	head := whole[:len(whole)-len(text)]
	ids, cut := t.bpe.EncodeCut(nil, head, bpe.Options{})
	ids = ids[:cut.Tokens]
	e := &node{tail: strings.Clone(head[cut.Text:]), inside: cut.Text > 0, stub: stub}
	t.cache.add(s.keys, last, nil, nil, ids, e)
	s.parts = append(s.parts[:0], tokens.Part{IDs: ids})
	s.text = append(append(s.text[:0], e.tail...), text...)
	return t.store(append(dst, ids...), len(s.items), e, e.inside, foldAll(stub, s.kinds[last:]), in, day, o, s), true
}

// storeSystem remembers the first message of a conversation that was rendered as whole.
func (t *Tokenizer) storeSystem(whole string, in chat.Input, s *scratch) {
	if _, e, _ := t.cache.find(s.keys, 1, nil); e != nil {
		return
	}
	system, _, err := t.appendMessage([]byte{'['}, s.items[0])
	if err != nil {
		return
	}
	in.Conversation, in.AddGenerationPrompt = append(system, ']'), false
	text, err := t.render(in)
	if err != nil || !strings.HasPrefix(whole, text) {
		return
	}
	ids, cut := t.bpe.EncodeCut(nil, text, bpe.Options{})
	t.cache.add(s.keys, 1, nil, nil, ids[:cut.Tokens], &node{
		tail: strings.Clone(text[cut.Text:]), inside: cut.Text > 0, stub: foldAll(nil, s.kinds[:1])})
}
