package tokenize

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/headrace/headrace/internal/chat"
)

// Most new messages are a role and a text, which templates write as it is, with the same around it each time. A shape is what a
// template writes around the texts of messages of certain roles behind a stub: filling it in takes a small part of the time that
// running the template does. It is told by running the template with texts that are made for it, twice: with short ones, and with
// long ones that have what filters would change. What a template looks for in a text stands in its source, so a text that
// has any of that goes the long way (inert).
type shape struct {
	around []string // one more than there are messages; nil where the texts are not written as they are
}

// shapes remembers them.
type shapes struct {
	mu sync.Mutex
	of map[string]shape
}

const (
	shapesMax        = 4096
	shapeMessagesMax = 4
)

// shapeTexts are what shapes are told by; a number is put before each.
var shapeTexts = [2]string{"Wv3Yq", "Wv3Yq Zz\t\"q\" 'p' \\ / <i>&amp;</i> é 漢字 {x} [y] #1 %2 a:b\n\n  two\r\n" + strings.Repeat("Long words, and\nlines. ", 200) + "Qj"}

// plainRoles are those whose messages have nothing but a text, as JSON.
var plainRoles = map[string]string{`"user"`: "user", `"assistant"`: "assistant", `"system"`: "system"}

// fillIn appends to s.text what the template writes for messages behind a stub, and notes their kinds. ok is false where they
// need the template itself; s.text is then as it was.
func (t *Tokenizer) fillIn(in chat.Input, day string, stub []kind, messages [][]byte, generate bool, s *scratch) (ok bool) {
	if !t.literals.ok || len(messages) > shapeMessagesMax {
		return false
	}
	var room [shapeMessagesMax][]byte
	texts := room[:len(messages)]
	s.kinds = s.kinds[:0]
	for i, raw := range messages {
		role := ""
		if role, texts[i] = plainMessage(raw); role == "" || role == "system" && bytes.Contains(texts[i], billing) {
			return false
		}
		s.kinds = append(s.kinds, kind{role: role, content: contentText})
	}
	f := t.shapeOf(in, day, stub, s.kinds, generate, s)
	if f.around == nil {
		return false
	}
	whole := len(s.text)
	for i, text := range texts {
		s.text = append(s.text, f.around[i]...)
		begin := len(s.text)
		if s.text, ok = appendUnquoted(s.text, text); !ok || !t.literals.inert(s.text[begin:]) {
			s.text = s.text[:whole]
			return false
		}
	}
	s.text = append(s.text, f.around[len(texts)]...)
	return true
}

// plainMessage returns the role of a message and its text as JSON, if there is nothing else to it; else "".
func plainMessage(raw []byte) (role string, text []byte) {
	m, err := readMessage(raw)
	if err != nil || !isString(m.content) || len(m.content) == 2 || m.name != nil || m.reasoning != nil || m.reasoningOld != nil ||
		m.calls != nil || m.callID != nil || m.task != nil || m.tools != nil {
		return "", nil
	}
	return plainRoles[string(m.role)], m.content
}

// appendUnquoted appends what a JSON string means.
func appendUnquoted(dst, quoted []byte) ([]byte, bool) {
	inner := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(inner, '\\') < 0 && utf8.Valid(inner) {
		return append(dst, inner...), true
	}
	text, err := unquote(quoted)
	return append(dst, text...), err == nil
}

// shapeOf tells the shape of messages of those kinds behind a stub, or remembers it.
func (t *Tokenizer) shapeOf(in chat.Input, day string, stub, kinds []kind, generate bool, s *scratch) shape {
	s.name = append(appendName(s.name[:0], &in, day, stub), 0xff, bit(generate))
	for _, k := range kinds {
		s.name = append(append(s.name, k.role...), 0)
	}
	t.shapes.mu.Lock()
	f, ok := t.shapes.of[string(s.name)]
	t.shapes.mu.Unlock()
	if ok {
		return f
	}
	name := string(s.name)
	f = t.tellShape(in, day, stub, kinds, generate)
	t.shapes.mu.Lock()
	defer t.shapes.mu.Unlock()
	if t.shapes.of == nil || len(t.shapes.of) >= shapesMax {
		t.shapes.of = map[string]shape{}
	}
	t.shapes.of[name] = f
	return f
}

// tellShape runs the template.
func (t *Tokenizer) tellShape(in chat.Input, day string, stub, kinds []kind, generate bool) (f shape) {
	for i, sample := range shapeTexts {
		var s scratch
		var messages []byte
		texts := make([]string, len(kinds))
		for k := range kinds {
			texts[k] = fmt.Sprintf("%d%s", k, sample)
			content, err := json.Marshal(texts[k])
			if err != nil {
				return shape{}
			}
			if k > 0 {
				messages = append(messages, ',')
			}
			if messages, _, err = t.appendMessage(messages, fmt.Appendf(nil, `{"role":%q,"content":%s}`, kinds[k].role, content)); err != nil {
				return shape{}
			}
		}
		whole, ok := t.behind(in, day, stub, messages, generate, &s)
		if !ok {
			return shape{}
		}
		around := cutAround(whole, texts)
		if around == nil || i > 0 && !slices.Equal(around, f.around) {
			return shape{}
		}
		f.around = around
	}
	return f
}

// cutAround is what stands around texts, each of which is there once and in order; nil where that is not so.
func cutAround(whole string, texts []string) []string {
	var around []string
	for _, text := range texts {
		before, rest, ok := strings.Cut(whole, text)
		if !ok {
			return nil
		}
		around, whole = append(around, before), rest
	}
	around = append(around, whole)
	for _, text := range texts {
		for _, a := range around {
			if strings.Contains(a, text) {
				return nil
			}
		}
	}
	return around
}

// literals are the strings in a template's source that it may look for in a text.
type literals struct {
	ok        bool     // whether it can be told what it looks for
	contained []string // within a text, or at its ends
	equal     []string // as all of it
}

// inert tells whether a template writes a text as it writes those that shapes are told by.
func (l *literals) inert(text []byte) bool {
	first, _ := utf8.DecodeRune(text)
	last, _ := utf8.DecodeLastRune(text)
	if len(text) == 0 || unicode.IsSpace(first) || unicode.IsSpace(last) { // templates trim
		return false
	}
	for _, w := range l.contained {
		if bytes.Contains(text, []byte(w)) {
			return false
		}
	}
	return !slices.Contains(l.equal, view(text))
}

// readLiterals finds the strings of a template. In doubt one counts as looked for. A template that looks for white space has no
// shapes: nearly every text has some.
func readLiterals(source string) (l literals) {
	marks := scanTags(source)
	for i, m := range marks {
		if m.text == nil || *m.text == "" {
			continue
		}
		at := func(k int) string {
			if k >= 0 && k < len(marks) {
				return marks[k].word
			}
			return ""
		}
		before, after, word := at(i-1), at(i+1), *m.text
		switch {
		case before == "[" && after == "]": // a key
		case before == "==" || before == "!=" || after == "==" || after == "!=" || before == "[" || after == "," && before == "," || before == "," && after == "]":
			l.equal = append(l.equal, word)
		case after != "in" && (before == "+" || before == "~" || before == "{{"), before != "(" && (after == "+" || after == "~"): // written
		case strings.TrimSpace(word) != "":
			l.contained = append(l.contained, word)
		case before == "(" && slices.Contains([]string{"strip", "lstrip", "rstrip"}, at(i-2)): // at the ends
		default:
			return literals{}
		}
	}
	l.ok = true
	return l
}

// tagMark is a string, a name or a sign within a template's tags.
type tagMark struct {
	word string
	text *string // of a string what it means
}

// scanTags finds them.
func scanTags(source string) (list []tagMark) {
	for {
		open := strings.IndexByte(source, '{')
		if open < 0 || open+1 >= len(source) {
			return list
		}
		kind := source[open+1]
		source = source[open+1:]
		switch kind {
		case '#':
			_, source, _ = strings.Cut(source, "#}")
		case '{', '%':
			list = append(list, tagMark{word: "{" + string(kind)})
			list, source = scanTag(list, strings.TrimLeft(source[1:], "-+"))
		}
	}
}

// scanTag reads a tag up to its end.
func scanTag(list []tagMark, s string) ([]tagMark, string) {
	for len(s) > 0 {
		c := s[0]
		switch {
		case c == '%' && strings.HasPrefix(s, "%}"), c == '}' && strings.HasPrefix(s, "}}"):
			return append(list, tagMark{word: s[:2]}), s[2:]
		case c == '\'' || c == '"':
			text, rest := scanQuoted(s)
			list, s = append(list, tagMark{text: &text}), rest
		case c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z':
			n := 1
			for n < len(s) && (s[n] == '_' || s[n] >= 'a' && s[n] <= 'z' || s[n] >= 'A' && s[n] <= 'Z' || s[n] >= '0' && s[n] <= '9') {
				n++
			}
			list, s = append(list, tagMark{word: s[:n]}), s[n:]
		case strings.HasPrefix(s, "==") || strings.HasPrefix(s, "!="):
			list, s = append(list, tagMark{word: s[:2]}), s[2:]
		case c == ' ' || c == '\n' || c == '\t' || c == '\r':
			s = s[1:]
		default:
			list, s = append(list, tagMark{word: s[:1]}), s[1:]
		}
	}
	return list, s
}

// scanQuoted reads a string.
func scanQuoted(s string) (text, rest string) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] == s[0]:
			return b.String(), s[i+1:]
		case s[i] == '\\' && i+1 < len(s):
			i++
			if at := strings.IndexByte("ntr", s[i]); at >= 0 {
				b.WriteByte("\n\t\r"[at])
			} else {
				b.WriteByte(s[i])
			}
		default:
			b.WriteByte(s[i])
		}
	}
	return b.String(), ""
}
