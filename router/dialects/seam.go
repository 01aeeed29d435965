package dialects

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
)

// Ways to go on with a stream whose engine died.
const (
	// Resumed: another engine gets the prompt's tokens and the answer's so far as its prompt.
	Resumed = "resumed"
	// Retold: another engine gets the client's request once more; what the client has is compared and left out.
	Retold = "retold"
	// Ended: there was nothing left but the end itself.
	Ended = "ended"
)

// seam stands between what the client has and what another engine says. It leaves out what is there already, and makes the rest look as
// the first engine's would.
type seam struct {
	resumed int      // tokens that the engine was given
	convert bool     // the engine answers a completion, the client asked for a chat
	texts   []told   // what is to come again first, and is not for the client
	ids     [][]byte // likewise
	logsAt  int64    // of the next token in the text, as log probabilities have it; -1 for as the engine says
	shift   int64    // of what the engine says, once it is known
	shifted bool
	// repeats, where the cut may lie within a character because what was drawn cannot be generated again: the answer's text, which the
	// engine then says before it goes on, all of the prompt in front.
	repeats string
}

// told is a text that the client has.
type told struct {
	kind textKind
	text string
}

var errDiverged = errors.New("the engine that went on with the answer came to another one than the client had been given")

// GoOn prepares the trail for another engine, and returns the request for it, how that goes on, and why nobody can when it is "". own is
// the client's request; contextTokens is what the engines have room for, 0 when nobody knows.
func (t *Trail) GoOn(own *Request, contextTokens int64) (next Request, how, why string) {
	next, t.seam = *own, nil
	if t.odd != "" {
		return next, "", t.odd
	}
	if t.finish && (!t.wants.usage || t.tokens && len(t.prompt) > 0) {
		return next, Ended, ""
	}
	if t.bare() { // whatever comes is new
		t.forget(point{})
		if len(t.head) > 0 {
			t.seam = &seam{logsAt: -1}
		}
		return next, Retold, ""
	}
	why = t.wants.retell
	if why == "" && !t.finish {
		var b *body.Body
		if b, why = t.resume(own, contextTokens); b != nil {
			next.Body, next.Path = b, pathCompletions
			return next, Resumed, ""
		}
	}
	if !t.wants.fixed {
		if why == "" {
			why = "its end is missing"
		}
		return next, "", why + ", and it is drawn at random"
	}
	t.seam = &seam{logsAt: -1, texts: t.told()}
	if t.given > 0 { // as often as the first engine said them, by the client's own wish too
		t.seam.ids = bytes.Split(t.ids, []byte{','})
	}
	return next, Retold, ""
}

const pathCompletions = "/v1/completions"

// bare tells whether the client has nothing of the answer, or nothing that shows.
func (t *Trail) bare() bool {
	return len(t.text) == 0 && !t.finish && (t.given == 0 || !t.wants.ids && !t.wants.logs)
}

// resume makes the request that goes on from the last point that is far enough back; else it says why there is none.
func (t *Trail) resume(own *Request, contextTokens int64) (*body.Body, string) {
	switch {
	case len(t.prompt) == 0:
		return nil, "its engine does not say the prompt's tokens"
	case t.wants.chat && !textOnly(own.Body.Value("messages")):
		return nil, "the prompt is more than text"
	}
	promptTokens := int64(countIDs(t.prompt))
	limit := t.wants.maxTokens
	if limit < 0 && !t.wants.chat {
		limit = completionTokens
	} else if limit < 0 {
		limit = contextTokens - promptTokens // all there is room for
	}
	p, again, ok := t.from(limit)
	all := ""
	if !t.wants.fixed && (!ok || again != "") && t.wants.stop == 0 && len(t.text) >= repeatBytesMin && int64(t.given) < limit && t.kind == kindContent {
		p, again, ok, all = point{t.given, len(t.text), len(t.ids)}, "", true, unquoted(t.text[t.marks[len(t.marks)-1].at:])
	}
	switch {
	case limit <= 0:
		return nil, "nobody knows how long it may become"
	case !ok:
		return nil, "its text has no point to go on from"
	case !t.wants.fixed && (again != "" || p.tokens < t.given && (t.wants.ids || t.wants.logs)):
		return nil, "its last tokens came together"
	}
	added := append([]byte(`"prompt":[`), t.prompt...)
	added = append(append(append(added, ','), t.ids[:p.ids]...), `],"max_tokens":`...)
	added = strconv.AppendInt(added, limit-int64(p.tokens), 10)
	if n := t.wants.minTokens - int64(p.tokens); n > 0 {
		added = strconv.AppendInt(append(added, `,"min_tokens":`...), n, 10)
	}
	added = append(append(added, ','), askForIDs...)
	drop := notContinued
	if t.wants.chat {
		drop = notContinuedChat
	}
	b, err := own.Body.Rewritten(drop, added)
	if err != nil {
		return nil, fmt.Sprintf("its continuation is refused: %v", err)
	}
	t.seam = &seam{resumed: p.tokens, convert: t.wants.chat, logsAt: t.nextOffset(), repeats: all}
	switch {
	case again != "":
		t.seam.texts = []told{{kindContent, again}}
	case !t.wants.ids && !t.wants.logs: // the client has nothing of the tokens behind
		t.forget(p)
	}
	if p.ids < len(t.ids) {
		t.seam.ids = bytes.Split(t.ids[p.ids+1:], []byte{','})
	}
	return b, ""
}

// forget drops the tokens behind p, of which the client has seen nothing.
func (t *Trail) forget(p point) {
	t.ids, t.given = t.ids[:p.ids:p.ids], p.tokens // whoever reads the old ones goes on undisturbed
}

// Usage is the event that says what an answer took whose tokens are known.
func (t *Trail) Usage() (raw, data []byte) {
	prompt := countIDs(t.prompt)
	raw = fmt.Appendf(append([]byte("data: "), t.head...), `"choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}`, prompt, prompt+t.given, t.given)
	return append(raw, "\n\n"...), raw[len("data: "):]
}

// repeatBytesMin is how long a text must be for nobody to say it again at once but an engine that says its prompt.
const repeatBytesMin = 48

// completionTokens is the length of a completion whose client does not say it.
const completionTokens = 16

// from finds the last point from which all that may still be found in the text is found: a stop string that ends in what is to come begins behind
// it. again is what the client has of the text behind it, where vLLM has kept back as much as may be the beginning of a stop string.
func (t *Trail) from(limit int64) (p point, again string, ok bool) {
	back := max(t.wants.stop-1, 0)
	for i := len(t.points) - 1; i >= 0; i-- {
		p = t.points[i]
		again = unquoted(t.text[p.text:])
		if int64(p.tokens) >= limit || utf8.RuneCountInString(again) < back {
			continue
		}
		if !t.wants.stopShown {
			for range back {
				_, n := utf8.DecodeRuneInString(again)
				again = again[n:]
			}
		}
		return p, again, true
	}
	return p, "", false
}

// told is all that the client has.
func (t *Trail) told() (list []told) {
	for i, m := range t.marks {
		end := len(t.text)
		if i+1 < len(t.marks) {
			end = t.marks[i+1].at
		}
		list = append(list, told{m.kind, unquoted(t.text[m.at:end])})
	}
	return list
}

// unquoted is the text of the inside of a JSON string.
func unquoted(inner []byte) string {
	if bytes.IndexByte(inner, '\\') < 0 {
		return string(inner)
	}
	var s string
	if json.Unmarshal(slices.Concat([]byte{'"'}, inner, []byte{'"'}), &s) != nil {
		return string(inner)
	}
	return s
}

// nextOffset is where in the text the token behind the last one begins, as a completion's log probabilities count it.
func (t *Trail) nextOffset() int64 {
	if len(t.logs) == 0 {
		return -1
	}
	offsets, tokens := gjson.GetBytes(t.logs, "text_offset").Array(), gjson.GetBytes(t.logs, "tokens").Array()
	if len(offsets) == 0 || len(tokens) != len(offsets) {
		return -1
	}
	return offsets[len(offsets)-1].Int() + int64(utf8.RuneCountInString(tokens[len(tokens)-1].String()))
}

// behind tells whether the engine that goes on has not come yet to where the client is.
func (t *Trail) behind() bool {
	return t.seam != nil && (len(t.seam.texts) > 0 || len(t.seam.ids) > 0)
}

// goOn takes an event of the engine that goes on.
func (t *Trail) goOn(arg []byte) ([]byte, error) {
	s := t.seam
	asked := t.wants.chat
	t.wants.chat = asked && !s.convert
	e := t.look(arg)
	t.wants.chat = asked
	if e.odd != "" {
		if t.behind() {
			return nil, fmt.Errorf("%w: %s", errDiverged, e.odd)
		}
		t.odd = e.odd
	}
	list, n := listOf(e.ids)
	had, err := s.skipIDs(list, n)
	if err != nil {
		return nil, err
	}
	cut := false
	for i := range e.texts {
		cutHere, err := s.skipText(&e.texts[i])
		if err != nil {
			return nil, err
		}
		cut = cut || cutHere
	}
	ends := e.choices > 0 && e.finish.Type == gjson.String
	if (ends || e.choices == 0) && t.behind() {
		return nil, fmt.Errorf("%w: it is shorter", errDiverged)
	}
	left := slices.ContainsFunc(e.texts, func(p piece) bool { return p.text != "" })
	if e.choices > 0 && !left && n == had && (!ends || t.finish) {
		return nil, nil
	}
	if cut && left && n == 0 && e.logs.IsObject() {
		return nil, fmt.Errorf("%w: an event with log probabilities would have to be cut", errDiverged)
	}
	if ends && t.finish {
		return nil, nil
	}
	t.scratch = append(append(t.scratch[:0], "data: "...), t.head...)
	if s.convert && e.choices > 0 {
		t.asChat(arg, &e, had, ends)
	} else {
		t.asItWas(arg, &e, had)
	}
	t.scratch = append(t.scratch, "\n\n"...)
	t.noteNew(&e, list, n, had, cut)
	t.finish = t.finish || ends
	return t.scratch, nil
}

// skipIDs leaves out of a list of n tokens what the client has: so many.
func (s *seam) skipIDs(list []byte, n int) (had int, err error) {
	for n > had && len(s.ids) > 0 {
		id, rest, _ := bytes.Cut(list, []byte{','})
		if !bytes.Equal(bytes.TrimSpace(id), bytes.TrimSpace(s.ids[0])) {
			return 0, fmt.Errorf("%w: token %s in place of %s", errDiverged, id, s.ids[0])
		}
		list, s.ids, had = rest, s.ids[1:], had+1
	}
	return had, nil
}

// skipText leaves out of a text what the client has. cut tells that there was some.
func (s *seam) skipText(p *piece) (cut bool, err error) {
	text := unquoted([]byte(p.text))
	if s.repeats != "" && text != "" {
		if i := strings.LastIndex(text, s.repeats); i >= 0 {
			text, cut = text[i+len(s.repeats):], true
		}
		s.repeats = ""
	}
	for text != "" && len(s.texts) > 0 {
		want := &s.texts[0]
		n := min(len(text), len(want.text))
		if p.kind != want.kind || text[:n] != want.text[:n] {
			return false, fmt.Errorf("%w: %.80q in place of %.80q", errDiverged, text, want.text)
		}
		cut = true
		text, want.text = text[n:], want.text[n:]
		if want.text == "" {
			s.texts = s.texts[1:]
		}
	}
	if cut {
		quoted := string(openai.AppendString(nil, text))
		p.text = quoted[1 : len(quoted)-1]
	}
	return cut, nil
}

// asItWas appends what is left of an event, from its choices on, with as few changes as can be.
func (t *Trail) asItWas(arg []byte, e *looked, had int) {
	var c cuts
	for _, p := range e.texts {
		if p.value.Raw != `"`+p.text+`"` {
			c.replace(p.value, `"`+p.text+`"`)
		}
	}
	if e.prompt.IsArray() {
		c.replace(e.prompt, "null")
	}
	switch {
	case !e.ids.IsArray():
	case !t.wants.ids:
		c.replace(e.ids, "null")
	case had > 0:
		c.replace(e.ids, listFrom(e.ids, had))
	}
	if e.logs.IsObject() {
		c.replace(e.logs, t.seam.logsFrom(e.logs, had))
	}
	if e.usage.IsObject() {
		c.replace(e.usage, t.seam.usage(e.usage))
	}
	from := bytes.Index(arg, []byte(`"choices":`))
	if from < 0 {
		from = 0
	}
	for i := range c {
		c[i].from, c[i].to = c[i].from-from, c[i].to-from
	}
	t.scratch = c.apply(t.scratch, arg[from:])
}

// asChat appends what is left of a completion's event as a chat's, from its choices on.
func (t *Trail) asChat(arg []byte, e *looked, had int, ends bool) {
	text := ""
	if len(e.texts) > 0 {
		text = e.texts[0].text
	}
	b := append(append(append(t.scratch, `"choices":[{"index":0,"delta":{"content":"`...), text...), `"},"logprobs":null,"finish_reason":`...)
	if b = append(b, e.finish.Raw...); ends {
		reason := gjson.GetBytes(arg, "choices.0.stop_reason").Raw
		if reason == "" {
			reason = "null"
		}
		b = append(append(b, `,"stop_reason":`...), reason...)
	}
	ids := "null"
	if t.wants.ids {
		ids = listFrom(e.ids, had)
	}
	b = append(append(append(b, `,"token_ids":`...), ids...), "}]"...)
	gjson.ParseBytes(arg).ForEach(func(name, v gjson.Result) bool {
		switch name.String() {
		case "id", "object", "created", "model", "choices":
		case "usage":
			b = append(append(b, `,"usage":`...), t.seam.usage(v)...)
		default:
			b = append(append(append(append(b, ','), name.Raw...), ':'), v.Raw...)
		}
		return true
	})
	t.scratch = append(b, '}')
}

// listFrom is a JSON list without its first n members.
func listFrom(v gjson.Result, n int) string {
	var b strings.Builder
	b.WriteByte('[')
	i := 0
	v.ForEach(func(_, m gjson.Result) bool {
		if i >= n {
			if i > n {
				b.WriteByte(',')
			}
			b.WriteString(m.Raw)
		}
		i++
		return true
	})
	b.WriteByte(']')
	return b.String()
}

// logsFrom are log probabilities without those of the first n tokens, at their places in the whole text.
func (s *seam) logsFrom(logs gjson.Result, n int) string {
	if s.logsAt >= 0 && !s.shifted {
		if at := logs.Get("text_offset").Array(); len(at) > n {
			s.shift, s.shifted = s.logsAt-at[n].Int(), true
		}
	}
	var b strings.Builder
	b.WriteByte('{')
	logs.ForEach(func(name, v gjson.Result) bool {
		if b.Len() > 1 {
			b.WriteByte(',')
		}
		b.WriteString(name.Raw + ":")
		switch {
		case name.String() == "text_offset" && s.shifted:
			b.WriteByte('[')
			for i, at := range v.Array()[min(n, len(v.Array())):] {
				if i > 0 {
					b.WriteByte(',')
				}
				b.WriteString(strconv.FormatInt(at.Int()+s.shift, 10))
			}
			b.WriteByte(']')
		case v.IsArray():
			b.WriteString(listFrom(v, n))
		default:
			b.WriteString(v.Raw)
		}
		return true
	})
	b.WriteByte('}')
	return b.String()
}

// usage is an engine's, of the whole request: what it was given of the answer is no prompt.
func (s *seam) usage(v gjson.Result) string {
	if s.resumed == 0 || !v.IsObject() {
		return v.Raw
	}
	prompt := v.Get("prompt_tokens").Int() - int64(s.resumed)
	var c cuts
	c.number(v, "prompt_tokens", func(int64) int64 { return prompt })
	c.number(v, "completion_tokens", func(n int64) int64 { return n + int64(s.resumed) })
	c.number(v, "prompt_tokens_details.cached_tokens", func(n int64) int64 { return min(n, prompt) })
	return string(c.apply(nil, []byte(v.Raw)))
}

// number replaces a number of the object v, where there is one.
func (c *cuts) number(v gjson.Result, path string, f func(int64) int64) {
	if n := gjson.Get(v.Raw, path); n.Type == gjson.Number {
		c.replace(n, strconv.FormatInt(f(n.Int()), 10))
	}
}

// noteNew remembers what the client gets of an event of the engine that goes on.
func (t *Trail) noteNew(e *looked, list []byte, n, had int, cut bool) {
	for range had {
		_, list, _ = bytes.Cut(list, []byte{','})
	}
	kind, last := t.kind, []byte(nil)
	for i, p := range e.texts {
		if kind, last = p.kind, []byte(p.text); i < len(e.texts)-1 {
			t.note(kind, last, nil, 0)
		}
	}
	t.note(kind, last, list, n-had)
	if n == 1 && had == 0 && !cut && len(last) > 0 && !t.behind() {
		t.point()
	}
	if t.wants.logs && e.logs.IsObject() && n > had {
		t.logs = append(t.logs[:0], t.seam.logsFrom(e.logs, had)...)
	}
}
