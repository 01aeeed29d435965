// Package body reads just enough of a client's request body to route it, and edits it by splicing bytes: what the
// router does not touch reaches the engine exactly as the client wrote it, integers over 2^53 included.
//
// It knows nothing of engines, workers or sockets.
package body

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"

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

	raw     []byte
	closing int // of the closing brace
	members []member

	stream, streamOptions, seed span // of values; zero when missing
}

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
	keyTransfer      = "kv_transfer_params"
	keyEncoder       = "ec_transfer_params"
	keyBootstrapHost = "bootstrap_host"
	keyBootstrapPort = "bootstrap_port"
	keyBootstrapRoom = "bootstrap_room"
)

// Parse reads b.
func Parse(b []byte) (*Body, *openai.Error) {
	p := &Body{raw: b, N: 1}
	var refused *openai.Error
	seen := make([]string, 0, 8)
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
		return nil, refused
	case err != nil:
		return nil, openai.BadRequest("", openai.CodeInvalidJSON, "We could not parse the JSON body of your request: it is %s.", err)
	case p.Model == "":
		return nil, openai.BadRequest(keyModel, "", "You must provide a model parameter.")
	case p.streamOptions.end > 0 && !p.Stream && !p.isNull(p.streamOptions):
		return nil, openai.BadRequest(keyStreamOptions, openai.CodeInvalidValue, "'stream_options' is only allowed together with 'stream': true.")
	}
	p.closing = closing
	return p, nil
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
	text := string(p.raw[value.start:value.end])
	switch name {
	case keyTransfer, keyEncoder, keyBootstrapHost, keyBootstrapPort, keyBootstrapRoom: // they name hosts that an engine connects to
		return openai.BadRequest(name, openai.CodeUnsupported, "'%s' is between router and engines, clients may not send it.", name)
	case keyModel:
		if text == "null" {
			return nil
		}
		if err := json.Unmarshal([]byte(text), &p.Model); err != nil {
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
	case keySeed:
		p.seed = value
		if text != "null" {
			p.Seed = text
		}
	}
	return nil
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
