// Package body reads just enough of a client's request body to route it, and edits it by splicing bytes: what the
// router does not touch reaches the engine exactly as the client wrote it, integers over 2^53 included.
//
// It knows nothing of engines, workers or sockets.
package body

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"unsafe"

	"github.com/headrace/headrace/internal/openai"
)

// Body is a client's request. It refers to the bytes it was parsed from, which must not change while it is in use.
type Body struct {
	Model        string
	Stream       bool
	IncludeUsage bool
	// Seed is the client's seed as it was written, "" when it gave none.
	Seed string
	// N is how many answers the client wants. What is no such number is left for the engine to refuse.
	N int
	// Priority is what the client wrote for vLLM: the lower, the sooner. What is no integer is left for the engine to refuse.
	Priority int
	// Extra has members that the router adds for itself, such as `"a":1`, where an engine gets the client's very body: in Whole
	// and With. An engine takes them for the last of their name.
	Extra string

	raw       []byte
	lastModel string // of the Body that had this memory before: mostly it is the same, and needs none
	closing   int    // of the closing brace
	members   []member

	stream, streamOptions, seed span // of values; zero when missing

	room  [membersUsual]member
	whole [1][]byte // what Whole returns
}

// membersUsual is how many members a body has that takes no further memory.
const membersUsual = 12

// member is one member of the object: from start the key, its quotes included, from value the value, up to end.
type member struct{ start, keyEnd, value, end int }

// The members that the router itself understands. Each may be given once: two engines could disagree about which
// of two counts.
const (
	keyModel         = "model"
	keyStream        = "stream"
	keyStreamOptions = "stream_options"
	keySeed          = "seed"
	keyN             = "n"
	keyPriority      = "priority"
	keyTransfer      = "kv_transfer_params"
	keyEncoder       = "ec_transfer_params"
	keyBootstrapHost = "bootstrap_host"
	keyBootstrapPort = "bootstrap_port"
	keyBootstrapRoom = "bootstrap_room"
	// keyExtraArgs has members that vLLM puts beside its own arguments, kv_transfer_params among them.
	keyExtraArgs = "vllm_xargs"
)

// Parse reads b.
func Parse(b []byte) (*Body, *openai.Error) {
	p := &Body{}
	if refused := p.Parse(b); refused != nil {
		return nil, refused
	}
	return p, nil
}

// Parse is the function Parse into the memory of a Body that nobody uses any more.
func (p *Body) Parse(b []byte) *openai.Error {
	*p = Body{raw: b, N: 1, lastModel: p.lastModel}
	p.members, p.whole[0] = p.room[:0], b
	var refused *openai.Error
	var seenRoom [8]string
	seen := seenRoom[:0]
	closing, err := scan(b, func(key, value span) error {
		p.members = append(p.members, member{key.start, key.end, value.start, value.end})
		name := keyName(b[key.start:key.end])
		if name == "" {
			return nil
		}
		for _, s := range seen {
			if s == name {
				refused = openai.BadRequest(name, openai.CodeInvalidValue, "%q is given twice.", name)
				return refused
			}
		}
		seen = append(seen, name)
		if refused = p.take(name, value); refused != nil {
			return refused
		}
		return nil
	})
	switch {
	case refused != nil:
		return refused
	case err != nil:
		return openai.BadRequest("", openai.CodeInvalidJSON, "We could not parse the JSON body of your request: it is %s.", err)
	case p.Model == "":
		return openai.BadRequest(keyModel, "", "You must provide a model parameter.")
	case p.streamOptions.end > 0 && !p.Stream && !p.isNull(p.streamOptions):
		return openai.BadRequest(keyStreamOptions, openai.CodeInvalidValue, "'stream_options' is only allowed together with 'stream': true.")
	}
	p.closing, p.lastModel = closing, p.Model
	return nil
}

// refuseTransfer refuses extra arguments that would be taken for what is between router and engines. What is no object is the
// engine's to refuse.
func refuseTransfer(args []byte) *openai.Error {
	var refused *openai.Error
	if len(args) == 0 || args[0] != '{' {
		return nil
	}
	_, _ = scan(args, func(key, _ span) error {
		if name := keyName(args[key.start:key.end]); name == keyTransfer || name == keyEncoder {
			refused = openai.BadRequest(keyExtraArgs, openai.CodeUnsupported, "'%s' is between router and engines, clients may not send it.", name)
			return refused
		}
		return nil
	})
	return refused
}

// keyName returns the name of a key that the router understands, else "".
func keyName(quoted []byte) string {
	switch string(unescaped(quoted)) { // the compiler makes no string of it here
	case keyModel:
		return keyModel
	case keyStream:
		return keyStream
	case keyStreamOptions:
		return keyStreamOptions
	case keySeed:
		return keySeed
	case keyN:
		return keyN
	case keyPriority:
		return keyPriority
	case keyTransfer:
		return keyTransfer
	case keyEncoder:
		return keyEncoder
	case keyBootstrapHost:
		return keyBootstrapHost
	case keyBootstrapPort:
		return keyBootstrapPort
	case keyBootstrapRoom:
		return keyBootstrapRoom
	case keyExtraArgs:
		return keyExtraArgs
	}
	return ""
}

// unescaped undoes the escapes of a key, since a key means the same however it is spelled.
func unescaped(quoted []byte) []byte {
	inner := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(inner, '\\') < 0 {
		return inner
	}
	var s string
	if json.Unmarshal(quoted, &s) != nil {
		return nil
	}
	return []byte(s)
}

func (p *Body) isNull(s span) bool { return string(p.raw[s.start:s.end]) == "null" }

// take reads the value of a member that the router understands.
func (p *Body) take(name string, value span) *openai.Error {
	text := unsafe.String(unsafe.SliceData(p.raw[value.start:]), value.end-value.start) // what is kept of it is copied
	switch name {
	case keyTransfer, keyEncoder, keyBootstrapHost, keyBootstrapPort, keyBootstrapRoom: // they name hosts that an engine connects to
		return openai.BadRequest(name, openai.CodeUnsupported, "'%s' is between router and engines, clients may not send it.", name)
	case keyExtraArgs:
		return refuseTransfer(p.raw[value.start:value.end])
	case keyModel:
		if text == "null" {
			return nil
		}
		if inner, ok := plainString(text); ok {
			if p.Model = p.lastModel; p.Model != inner {
				p.Model = strings.Clone(inner)
			}
		} else if err := json.Unmarshal([]byte(text), &p.Model); err != nil {
			return openai.BadRequest(keyModel, openai.CodeInvalidValue, "'model' must be a string.")
		}
	case keyStream:
		p.stream = value
		if text != "true" && text != "false" && text != "null" {
			return openai.BadRequest(keyStream, openai.CodeInvalidValue, "'stream' must be true or false.")
		}
		p.Stream = text == "true"
	case keyStreamOptions:
		p.streamOptions = value
		return p.takeStreamOptions(value)
	case keyN:
		if n, err := openai.ParseN(p.raw[value.start:value.end]); err == nil {
			p.N = n
		}
	case keyPriority:
		if n, err := strconv.ParseInt(text, 10, 64); err == nil || errors.Is(err, strconv.ErrRange) {
			p.Priority = int(n)
		}
	case keySeed:
		p.seed = value
		if text != "null" {
			p.Seed = strings.Clone(text)
		}
	}
	return nil
}

// plainString is the text of a JSON string that is spelled as it is: without escapes and in ASCII.
func plainString(quoted string) (string, bool) {
	if len(quoted) < 2 || quoted[0] != '"' {
		return "", false
	}
	inner := quoted[1 : len(quoted)-1]
	for i := range len(inner) {
		if c := inner[i]; c < ' ' || c == '\\' || c >= 0x80 {
			return "", false
		}
	}
	return inner, true
}

func (p *Body) takeStreamOptions(value span) *openai.Error {
	if p.isNull(value) {
		return nil
	}
	var o struct {
		IncludeUsage *bool `json:"include_usage"`
	}
	if err := json.Unmarshal(p.raw[value.start:value.end], &o); err != nil {
		return openai.BadRequest(keyStreamOptions, openai.CodeInvalidValue, "'stream_options' must be an object whose 'include_usage' is true or false.")
	}
	p.IncludeUsage = o.IncludeUsage != nil && *o.IncludeUsage
	return nil
}

// Raw is the body as the client sent it, not to be changed.
func (p *Body) Raw() []byte { return p.raw }

// Len is the length of the body as the client sent it.
func (p *Body) Len() int { return len(p.raw) }

// IntegerSeed tells whether the client's seed is an integer; any other is left for the engine to refuse.
func (p *Body) IntegerSeed() bool {
	digits := strings.TrimPrefix(p.Seed, "-")
	return digits != "" && skipDigits([]byte(digits), 0) == len(digits)
}

// Streaming returns the body in pieces, up to and without its closing brace and ending in a comma, changed such that
// it asks for a stream with usage and has a seed. The caller appends further members and the brace. All pieces but
// the inserted ones lie in the client's bytes.
func (p *Body) Streaming(seed uint64) [][]byte {
	const usage = `{"include_usage":true}`
	type edit struct {
		at   span
		with string
	}
	edits := make([]edit, 0, 3)
	missing := ""
	set := func(at span, key, value string) {
		if at.end == 0 {
			missing += `"` + key + `":` + value + ","
			return
		}
		edits = append(edits, edit{at, value})
		for i := len(edits) - 1; i > 0 && edits[i].at.start < edits[i-1].at.start; i-- {
			edits[i], edits[i-1] = edits[i-1], edits[i]
		}
	}
	set(p.stream, keyStream, "true")
	set(p.streamOptions, keyStreamOptions, usage)
	if p.Seed == "" {
		set(p.seed, keySeed, strconv.FormatUint(seed, 10))
	}
	pieces := make([][]byte, 0, 2*len(edits)+2)
	from := 0
	for _, e := range edits {
		pieces = append(pieces, p.raw[from:e.at.start], []byte(e.with))
		from = e.at.end
	}
	pieces = append(pieces, p.raw[from:p.closing])
	if len(p.members) > 0 {
		missing = "," + missing
	}
	if missing != "" {
		pieces = append(pieces, []byte(missing))
	}
	return pieces
}
