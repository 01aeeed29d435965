package dialects

import (
	"bytes"
	"slices"
	"sync"

	"github.com/tidwall/gjson"
)

const (
	// trailBytesMax bounds what is remembered of a stream's text, and of its tokens; promptBytesMax of a prompt's tokens, seven
	// bytes each as a rule.
	trailBytesMax  = 256 << 10
	promptBytesMax = 512 << 10
	// trailBytesKept is how large buffers may be that serve another stream.
	trailBytesKept = 16 << 10
)

// Trail is what a stream of a foreign engine has given the client: what it takes for another engine to go on with it. It sees
// each event of the stream on its way and takes out what the router asked the engine for on its own behalf.
//
// An engine that is given the tokens so far as a part of the prompt begins to make text of what follows. So tokens are known
// to have become text at some points only: behind an event of one token that brought text. (An event of several may end in a
// part of a character, and engines that are cut there do not go on right: vLLM repeats the whole prompt.) What lies behind
// the last such point is generated again, compared, and not given again.
type Trail struct {
	wants  wants
	asks   bool // the engine was asked for token ids by the router
	tokens bool // they are to be had, as far as is known

	head   []byte // of the first chunk, up to its choices
	prompt []byte // its tokens, with commas between
	ids    []byte // the answer's tokens likewise
	given  int    // how many
	text   []byte // as it stood in JSON
	kind   textKind
	marks  []mark  // where the text became one of another kind
	points []point // where one can go on, the last ones first to be used
	logs   []byte  // the last log probabilities
	finish bool    // the client has the finish reason
	odd    string  // why nobody can go on, found out on the way

	seam    *seam // in front of what another engine goes on with
	scratch []byte
}

// textKind is what a text is for. Its value is the member's name.
type textKind string

const (
	kindNone      textKind = ""
	kindContent   textKind = "content" // of completions too
	kindReasoning textKind = "reasoning"
)

type mark struct {
	at   int // in the text
	kind textKind
}

// point is where an answer can be gone on with: so many tokens are so much text.
type point struct{ tokens, text, ids int }

var trails = sync.Pool{New: func() any { return new(Trail) }}

// NewTrail makes the trail of a request's stream, nil when its answer could not be moved. It sets the body's Extra to what the
// engines are to be asked for besides. The caller gives it back with Free.
func NewTrail(q *Request, m Memory) *Trail {
	if q.Body.Extra != "" { // the choices of one request, which share its body and have no trail, come here at once
		q.Body.Extra = ""
	}
	if m == Nothing || !q.Stream {
		return nil
	}
	w := wantsOf(q.Path, q.Body)
	tokens := m == Tokens && w.retell == ""
	if w.never != "" || !tokens && !w.fixed {
		return nil
	}
	t := trails.Get().(*Trail)
	*t = Trail{wants: w, tokens: tokens, asks: tokens && !w.ids,
		head: t.head[:0], prompt: t.prompt[:0], ids: t.ids[:0], text: t.text[:0], marks: t.marks[:0], points: t.points[:0], logs: t.logs[:0], scratch: t.scratch[:0]}
	if t.asks {
		q.Body.Extra = askForIDs
	}
	return t
}

const askForIDs = `"return_token_ids":true`

// Free gives back a trail, nil too.
func (t *Trail) Free() {
	if t != nil && cap(t.prompt)+cap(t.ids)+cap(t.text)+cap(t.logs)+cap(t.scratch) <= trailBytesKept {
		trails.Put(t)
	}
}

// Given is how many tokens the client has, where that is known; nil has none.
func (t *Trail) Given() int {
	if t == nil {
		return 0
	}
	return t.given
}

// Nevers says why a request's answer cannot be moved, by what it asks for, for a request without a trail.
func Nevers(q *Request, m Memory) string {
	w := wantsOf(q.Path, q.Body)
	switch {
	case m == Nothing:
		return "migration is off for its kind of engine"
	case w.never != "":
		return w.never
	case w.retell != "":
		return w.retell + ", and it is drawn at random"
	}
	return "it is drawn at random, and its tokens are not known"
}

// take sees an event of the first engine's and returns what the client is to get of it, nothing as the case may be. It is valid
// until the next call.
func (t *Trail) take(raw, arg []byte) ([]byte, error) {
	if t.seam != nil {
		return t.goOn(arg)
	}
	if len(t.head) > 0 && !t.wants.logs {
		if out, ok := t.quick(raw); ok {
			return out, nil
		}
	}
	return t.slow(raw, arg), nil
}

var (
	memberDelta  = []byte(`"delta":{"`)
	memberText   = []byte(`"text":"`)
	memberIDs    = []byte(`"token_ids":`)
	notFinished  = []byte(`"finish_reason":null`)
	openContent  = []byte(`content":"`)
	openReason   = []byte(`reasoning":"`)
	openReasoned = []byte(`reasoning_content":"`)
)

// quick is slow for what nearly all events look like: one text, and it is not the end. A quote within a string is escaped, so a
// member's name with its quotes is a member.
func (t *Trail) quick(raw []byte) (out []byte, ok bool) {
	kind, open := kindContent, memberText
	if t.wants.chat {
		open = memberDelta
	}
	at := bytes.Index(raw, open)
	if at < 0 {
		return nil, false
	}
	at += len(open)
	if t.wants.chat {
		switch name := raw[at:]; {
		case bytes.HasPrefix(name, openContent):
			at += len(openContent)
		case bytes.HasPrefix(name, openReason):
			at, kind = at+len(openReason), kindReasoning
		case bytes.HasPrefix(name, openReasoned):
			at, kind = at+len(openReasoned), kindReasoning
		default:
			return nil, false
		}
	}
	end := closingQuote(raw, at)
	if end < 0 {
		return nil, false
	}
	rest := raw[end+1:]
	if t.wants.chat && rest[0] != '}' || !bytes.Contains(rest, notFinished) {
		return nil, false
	}
	from := bytes.Index(rest, memberIDs) + len(memberIDs)
	if from < len(memberIDs) || rest[from] != '[' {
		t.note(kind, raw[at:end], nil, 0)
		t.silent(end-at, 0)
		return raw, true
	}
	to := from + bytes.IndexByte(rest[from:], ']')
	if to < from {
		return nil, false
	}
	ids := rest[from+1 : to]
	n := countIDs(ids)
	t.note(kind, raw[at:end], ids, n)
	t.silent(end-at, n)
	if n == 1 && end > at {
		t.point()
	}
	if !t.asks {
		return raw, true
	}
	t.scratch = append(append(append(t.scratch[:0], raw[:end+1+from]...), "null"...), rest[to+1:]...)
	return t.scratch, true
}

// closingQuote returns where the string ends whose first character is at b[i], -1 if it does not.
func closingQuote(b []byte, i int) int {
	for {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 || i+n+1 >= len(b) {
			return -1
		}
		i += n
		slashes := 0
		for slashes < n && b[i-1-slashes] == '\\' {
			slashes++
		}
		if slashes%2 == 0 {
			return i
		}
		i++
	}
}

// countIDs counts the members of a list of numbers.
func countIDs(ids []byte) int {
	if len(ids) == 0 {
		return 0
	}
	return 1 + bytes.Count(ids, []byte{','})
}

// note remembers what the client gets by an event: a text, and n tokens.
func (t *Trail) note(kind textKind, text, ids []byte, n int) {
	if t.odd != "" {
		return
	}
	if n > 0 {
		if len(t.ids) > 0 {
			t.ids = append(t.ids, ',')
		}
		t.ids = append(t.ids, ids...)
		t.given += n
	}
	if len(text) > 0 {
		if kind != t.kind {
			t.kind, t.marks = kind, append(t.marks, mark{len(t.text), kind})
			t.points = t.points[:0]
		}
		t.text = append(t.text, text...)
	}
	if len(t.text) > trailBytesMax || len(t.ids) > trailBytesMax {
		t.odd = "the answer is too long to be remembered"
	}
}

// point notes that one can go on from here. Where a stop string may begin in what is known and end in what is not, one has to go
// on from further back.
func (t *Trail) point() {
	if t.kind != kindContent {
		return
	}
	if t.wants.stop == 0 {
		t.points = t.points[:0]
	}
	t.points = append(t.points, point{t.given, len(t.text), len(t.ids)})
}

// looked is an event, read.
type looked struct {
	texts   []piece
	ids     gjson.Result // a list, or nothing
	prompt  gjson.Result
	logs    gjson.Result
	finish  gjson.Result
	usage   gjson.Result
	choices int
	odd     string
	// bare: a chat's event that says nothing.
	bare bool
}

type piece struct {
	kind  textKind
	text  string       // as it stands in JSON, without its quotes
	value gjson.Result // where it stands
}

// look reads an event.
func (t *Trail) look(arg []byte) (e looked) {
	if !gjson.ValidBytes(arg) {
		e.odd = "an event is no JSON"
		return e
	}
	v := gjson.ParseBytes(arg)
	choices := v.Get("choices")
	choices.ForEach(func(_, _ gjson.Result) bool { e.choices++; return true })
	if e.choices > 1 {
		e.odd = "several answers"
	}
	e.usage, e.prompt = v.Get("usage"), v.Get("prompt_token_ids")
	if e.choices == 0 {
		return e
	}
	c := v.Get("choices.0")
	e.ids, e.logs, e.finish = v.Get("choices.0.token_ids"), v.Get("choices.0.logprobs"), c.Get("finish_reason")
	if !e.prompt.IsArray() {
		e.prompt = v.Get("choices.0.prompt_token_ids")
	}
	add := func(kind textKind, value gjson.Result) {
		if s := value.Raw; value.Type == gjson.String && len(s) > 2 {
			e.texts = append(e.texts, piece{kind, s[1 : len(s)-1], value})
		}
	}
	if !t.wants.chat {
		add(kindContent, v.Get("choices.0.text"))
		return e
	}
	members := 0
	c.Get("delta").ForEach(func(name, value gjson.Result) bool {
		members++
		switch {
		case name.String() == "role", value.Type == gjson.Null, value.IsArray() && len(value.Array()) == 0:
		case name.String() == "content":
			add(kindContent, v.Get("choices.0.delta.content"))
		case name.String() == "reasoning":
			add(kindReasoning, v.Get("choices.0.delta.reasoning"))
		case name.String() == "reasoning_content":
			add(kindReasoning, v.Get("choices.0.delta.reasoning_content"))
		case value.Type != gjson.String || value.String() != "":
			e.odd = "the answer has " + name.String()
		}
		return true
	})
	e.bare = members == 0 && e.finish.Type == gjson.Null && e.logs.Type == gjson.Null
	return e
}

// slow takes any event.
func (t *Trail) slow(raw, arg []byte) []byte {
	e := t.look(arg)
	if e.odd != "" && t.odd == "" {
		t.odd = e.odd
	}
	if len(t.head) == 0 {
		if i := bytes.Index(arg, []byte(`"choices":`)); i >= 0 {
			t.head = append(t.head, arg[:i]...)
		} else if t.odd == "" {
			t.odd = "its events are not as OpenAI's"
		}
	}
	if e.prompt.IsArray() && t.tokens && len(t.prompt) == 0 {
		if list := e.prompt.Raw; len(list) <= promptBytesMax {
			t.prompt = append(t.prompt, list[1:len(list)-1]...)
		} else {
			t.tokens, t.wants.retell = false, "the prompt is too long to be remembered"
		}
	}
	t.noteAll(&e)
	if e.choices > 0 && e.finish.Type == gjson.String {
		t.finish = true
	}
	if !t.asks {
		return raw
	}
	if e.bare && e.ids.IsArray() && e.choices == 1 {
		return nil // the engine would not have sent it
	}
	var cuts cuts
	for _, list := range []gjson.Result{e.prompt, e.ids} {
		if list.IsArray() {
			cuts.replace(list, "null")
		}
	}
	if len(cuts) == 0 {
		return raw
	}
	t.scratch = append(t.scratch[:0], "data: "...)
	t.scratch = append(cuts.apply(t.scratch, arg), "\n\n"...)
	return t.scratch
}

// noteAll notes an event that is given whole.
func (t *Trail) noteAll(e *looked) {
	ids, n := listOf(e.ids)
	kind, last := t.kind, []byte(nil)
	for i, p := range e.texts {
		if kind, last = p.kind, []byte(p.text); i < len(e.texts)-1 { // the tokens are counted with the last text
			t.note(kind, last, nil, 0)
		}
	}
	t.note(kind, last, ids, n)
	t.silent(len(last), n)
	if n == 1 && len(last) > 0 {
		t.point()
	}
	if t.wants.logs && e.logs.IsObject() {
		t.logs = append(t.logs[:0], e.logs.Raw...)
	}
}

// silent notes that an engine which was asked for its tokens gave a text and none.
func (t *Trail) silent(text, n int) {
	if text > 0 && n == 0 && t.tokens {
		t.tokens, t.wants.retell = false, "its engine does not say its tokens"
	}
}

// listOf is a list of token ids without its brackets.
func listOf(v gjson.Result) ([]byte, int) {
	if !v.IsArray() {
		return nil, 0
	}
	ids := bytes.TrimSpace([]byte(v.Raw[1 : len(v.Raw)-1]))
	return ids, countIDs(ids)
}

// cuts are places of a JSON text with what stands there instead.
type cuts []cut

type cut struct {
	from, to int
	with     string
}

func (c *cuts) replace(v gjson.Result, with string) {
	if v.Index > 0 {
		*c = append(*c, cut{v.Index, v.Index + len(v.Raw), with})
	}
}

// apply appends b with the cuts made.
func (c cuts) apply(dst, b []byte) []byte {
	slices.SortFunc(c, func(a, b cut) int { return a.from - b.from })
	from := 0
	for _, x := range c {
		dst = append(append(dst, b[from:x.from]...), x.with...)
		from = x.to
	}
	return append(dst, b[from:]...)
}
