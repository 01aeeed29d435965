package openai

import (
	"bytes"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/tidwall/gjson"
)

// TokenLogprob is a token with the logarithm of its probability.
type TokenLogprob struct {
	Token   int32
	Logprob float32
}

// Logprob is what a response says of one token.
type Logprob struct {
	TokenLogprob
	// Unknown is the case of a prompt's first token, which nothing comes before.
	Unknown bool
	Top     []TokenLogprob
}

// logprobLeast stands for minus infinity, which JSON cannot say.
const logprobLeast = -9999

// The lists that the two endpoints' objects have.
var logprobLists = [2][]string{Chat: {"content"}, Completions: {"tokens", "token_logprobs", "top_logprobs", "text_offset"}}

// Logprobs is the object `logprobs` of a choice or of a part of one, rendered as it grows. The zero value is null.
type Logprobs struct {
	lists [4][]byte // the elements, with commas between them
}

// LogprobStyle says how Logprobs are rendered, and where in the text the next token begins.
type LogprobStyle struct {
	Endpoint    Endpoint
	Vocab       Vocab
	KeepSpecial bool
	// Offset counts characters: those that have begun before the next token. It is a function of the tokens so far.
	Offset int
}

// Advance moves the offset over tokens that somebody else has rendered.
func (st *LogprobStyle) Advance(tokens []int32) {
	for _, id := range tokens {
		if st.KeepSpecial || !st.Vocab.Special(id) {
			st.Offset += runesBegun(st.Vocab.TokenBytes(id))
		}
	}
}

func runesBegun(b []byte) int {
	n := 0
	for _, c := range b {
		if utf8.RuneStart(c) {
			n++
		}
	}
	return n
}

// Add appends a token.
func (l *Logprobs) Add(st *LogprobStyle, p *Logprob) {
	for i := range logprobLists[st.Endpoint] {
		if len(l.lists[i]) > 0 {
			l.lists[i] = append(l.lists[i], ',')
		}
	}
	if st.Endpoint == Chat {
		l.lists[0] = appendChatLogprob(l.lists[0], st.Vocab, p)
		return
	}
	l.lists[0] = appendTokenName(l.lists[0], st.Vocab.TokenBytes(p.Token))
	if p.Unknown {
		l.lists[1] = append(l.lists[1], "null"...)
		l.lists[2] = append(l.lists[2], "null"...)
	} else {
		l.lists[1] = appendLogprob(l.lists[1], p.Logprob)
		l.lists[2] = appendTopNames(l.lists[2], st.Vocab, p)
	}
	l.lists[3] = strconv.AppendInt(l.lists[3], int64(st.Offset), 10)
	st.Advance([]int32{p.Token})
}

// addRaw appends what another Logprobs was rendered to.
func (l *Logprobs) addRaw(ep Endpoint, v gjson.Result) {
	for i, name := range logprobLists[ep] {
		raw := v.Get(name).Raw
		if len(raw) < 2 || raw[0] != '[' {
			continue
		}
		inner := bytes.TrimSpace([]byte(raw[1 : len(raw)-1]))
		if len(inner) == 0 {
			continue
		}
		if len(l.lists[i]) > 0 {
			l.lists[i] = append(l.lists[i], ',')
		}
		l.lists[i] = append(l.lists[i], inner...)
	}
}

// appendJSON appends the object.
func (l *Logprobs) appendJSON(dst []byte, ep Endpoint) []byte {
	if l == nil || len(l.lists[0]) == 0 {
		return append(dst, "null"...)
	}
	sep := byte('{')
	for i, name := range logprobLists[ep] {
		dst = append(dst, sep, '"')
		dst = append(dst, name...)
		dst = append(dst, `":[`...)
		dst = append(dst, l.lists[i]...)
		dst = append(dst, ']')
		sep = ','
	}
	if ep == Chat {
		dst = append(dst, `,"refusal":null`...)
	}
	return append(dst, '}')
}

func appendLogprob(dst []byte, v float32) []byte {
	if !(v >= logprobLeast) || math.IsInf(float64(v), 1) {
		v = logprobLeast
	}
	if v == 0 {
		v = 0 // without the sign
	}
	return strconv.AppendFloat(dst, float64(v), 'g', -1, 32)
}

func appendChatLogprob(dst []byte, v Vocab, p *Logprob) []byte {
	dst = append(appendChatToken(dst, v, p.TokenLogprob), `,"top_logprobs":[`...)
	for i, t := range p.Top {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendChatToken(dst, v, t), '}')
	}
	return append(dst, "]}"...)
}

// appendChatToken appends an object without its closing brace.
func appendChatToken(dst []byte, v Vocab, t TokenLogprob) []byte {
	b := v.TokenBytes(t.Token)
	dst = append(dst, `{"token":`...)
	dst = AppendString(dst, b)
	dst = append(dst, `,"logprob":`...)
	dst = appendLogprob(dst, t.Logprob)
	dst = append(dst, `,"bytes":[`...)
	for i, c := range b {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(c), 10)
	}
	return append(dst, ']')
}

// appendTokenName names a token by its text; what is no text is spelled as OpenAI does, "bytes:\xe2\x82".
func appendTokenName(dst, b []byte) []byte {
	if utf8.Valid(b) {
		return AppendString(dst, b)
	}
	dst = append(dst, `"bytes:`...)
	for _, c := range b {
		dst = append(dst, '\\', '\\', 'x', hexDigits[c>>4], hexDigits[c&0xf])
	}
	return append(dst, '"')
}

// appendTopNames appends the most likely tokens by name, the token itself among them. Tokens of one name are one
// member, the likelier's.
func appendTopNames(dst []byte, v Vocab, p *Logprob) []byte {
	dst = append(dst, '{')
	start, ended := len(dst), [][2]int{}
	add := func(t TokenLogprob) {
		at := len(dst)
		if at > start {
			dst = append(dst, ',')
			at++
		}
		dst = appendTokenName(dst, v.TokenBytes(t.Token))
		for _, e := range ended {
			if bytes.Equal(dst[e[0]:e[1]], dst[at:]) {
				dst = dst[:max(start, at-1)]
				return
			}
		}
		ended = append(ended, [2]int{at, len(dst)})
		dst = append(dst, ':')
		dst = appendLogprob(dst, t.Logprob)
	}
	chosen := false
	for _, t := range p.Top {
		add(t)
		chosen = chosen || t.Token == p.Token
	}
	if !chosen {
		add(p.TokenLogprob)
	}
	return append(dst, '}')
}
