package openai

import "slices"

// Vocab is what a Detok needs to know of a tokenizer.
type Vocab interface {
	// TokenBytes returns the bytes a token stands for, which need not be whole UTF-8 sequences, or nil for an unknown
	// id. The caller does not change them.
	TokenBytes(id int32) []byte
	// Special reports whether the token is a control token, which yields no text by default.
	Special(id int32) bool
}

// Detok turns a list of tokens into text, a token at a time. The text released after any number of tokens is a pure
// function of the stop strings and these tokens: whoever continues a stream elsewhere pushes the tokens so far, drops
// what comes back, and goes on.
//
// Held back are the beginning of a UTF-8 sequence, and text that may be the beginning of a stop string. Of several
// stop strings the one that ends first in the text wins, the longest of those that end at the same byte.
type Detok struct {
	vocab       Vocab
	keepSpecial bool
	stops       []matcher
	partial     []byte // the beginning of a UTF-8 sequence
	held        []byte // text that may begin a stop string
	out         []byte
	stopped     bool
	stop        string
}

// DetokOptions are the request's wishes. The zero value stops at nothing and leaves special tokens out.
type DetokOptions struct {
	Stop        []string
	KeepSpecial bool
}

// NewDetok makes a Detok. Empty stop strings are ignored.
func NewDetok(v Vocab, o DetokOptions) *Detok {
	d := &Detok{vocab: v, keepSpecial: o.KeepSpecial}
	for _, s := range o.Stop {
		if s != "" {
			d.stops = append(d.stops, newMatcher(s))
		}
	}
	return d
}

// Push adds a token and returns the text it releases, valid until the next call, and whether a stop string is complete.
// After a stop nothing is released any more.
func (d *Detok) Push(token int32) (text []byte, stopped bool) {
	if d.stopped {
		return nil, true
	}
	d.out = d.out[:0]
	if !d.keepSpecial && d.vocab.Special(token) {
		return nil, false
	}
	d.partial = append(d.partial, d.vocab.TokenBytes(token)...)
	b := d.partial
	for len(b) > 0 && !d.stopped {
		n, ok, partial := sequencePart(b)
		if partial {
			break
		}
		if ok {
			d.release(b[:n])
		} else {
			d.release([]byte("\uFFFD"))
		}
		b = b[n:]
	}
	d.partial = append(d.partial[:0], b...)
	return d.out, d.stopped
}

// PushAll adds tokens whose text is not wanted, because somebody else has already given it to the client. It reports
// whether a stop string is complete.
func (d *Detok) PushAll(tokens []int32) (stopped bool) {
	for _, t := range tokens {
		if _, stopped = d.Push(t); stopped {
			return true
		}
	}
	return d.stopped
}

// Flush ends the text and returns what was held back. After a stop there is nothing.
func (d *Detok) Flush() []byte {
	d.out = d.out[:0]
	if d.stopped {
		return nil
	}
	if len(d.partial) > 0 {
		d.partial = d.partial[:0]
		d.release([]byte("\uFFFD"))
	}
	d.out = append(d.out, d.held...)
	d.held = d.held[:0]
	return d.out
}

// release passes one character on through the matchers.
func (d *Detok) release(char []byte) {
	if len(d.stops) == 0 {
		d.out = append(d.out, char...)
		return
	}
	for _, c := range char {
		d.held = append(d.held, c)
		longest, hit := 0, -1
		for i := range d.stops {
			m := &d.stops[i]
			if m.step(c) && (hit < 0 || len(m.text) > len(d.stops[hit].text)) {
				hit = i
			}
			longest = max(longest, m.state)
		}
		if hit >= 0 {
			d.stop, d.stopped = d.stops[hit].text, true
			d.out = append(d.out, d.held[:len(d.held)-len(d.stop)]...)
			d.held = d.held[:0]
			return
		}
		free := len(d.held) - longest
		d.out = append(d.out, d.held[:free]...)
		d.held = slices.Delete(d.held, 0, free)
	}
}

// matcher is Knuth-Morris-Pratt over one stop string: a step costs amortised constant time, and its state is the
// length of the longest suffix of the text so far that begins the stop string.
type matcher struct {
	text  string
	fail  []int
	state int
}

func newMatcher(s string) matcher {
	fail := make([]int, len(s)+1)
	for i, k := 1, 0; i < len(s); i++ {
		for k > 0 && s[i] != s[k] {
			k = fail[k]
		}
		if s[i] == s[k] {
			k++
		}
		fail[i+1] = k
	}
	return matcher{text: s, fail: fail}
}

func (m *matcher) step(c byte) bool {
	for m.state > 0 && m.text[m.state] != c {
		m.state = m.fail[m.state]
	}
	if m.text[m.state] == c {
		m.state++
	}
	return m.state == len(m.text)
}
