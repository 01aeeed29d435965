package dialects

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// SGLangName is the dialect of SGLang in its prefill and decode modes.
const SGLangName = pairing.DialectSGLang

// roomsMax bounds the answers of one request, each of which has a room.
const roomsMax = 1024

// SGLang sends the client's request to both engines at once, with the address of prefill's bootstrap server and a random room
// in which the two meet. Sent one after the other they would wait for each other for ever.
//
// An engine that loses its peer, or its client, may hold KV cache for minutes: it is told that the request is void.
type SGLang struct {
	Client  *upstream.Client
	Probes  *Prober
	Errands *Errands
}

var _ Dialect = (*SGLang)(nil)

// Name is "sglang".
func (*SGLang) Name() string { return SGLangName }

// Run serves the request by a pair, or by a worker in neither mode.
func (g *SGLang) Run(ctx context.Context, a *Attempt, s Sink) Outcome {
	// The id is new for each dispatch and of one length: an engine takes what it is told to abort for the beginning of ids.
	r := &relay{Attempt: a, client: g.Client, probes: g.Probes, sink: s, errands: g.Errands, rid: uuid(), sameBody: true, tongue: tongue{deaf: true}}
	return r.serve(ctx, g)
}

// pair sends both legs.
func (g *SGLang) pair(_ context.Context, r *relay) *Outcome {
	d := r.Decision
	host, port, err := splitAddr(d.Prefill.KVAddr)
	if err != nil {
		return r.unregistered(d.Prefill, err)
	}
	sent := sglangBody(r.Request, ridMember(bootstrapMembers(host, port, rooms(r.Request.Body)), r.rid))
	if r.Request.Path == PathGenerate && string(r.Request.Body.Value("return_logprob")) == "true" {
		r.merge = &logprobs{}
	}
	r.answer = r.send(call{worker: d.Decode, role: roleDecode, body: sent})
	r.prefill = r.send(call{worker: d.Prefill, role: rolePrefill, body: sent, stream: r.Request.Stream})
	return nil
}

// PathGenerate is SGLang's own endpoint.
const PathGenerate = "/generate"

// notSGLangs are members of a request that are not passed on: the engine's name for it is the router's to choose. notGenerates
// are those where the model's name is the router's concern alone.
var notSGLangs, notGenerates = set("rid"), set("rid", "model")

// sglangBody is the client's body with further members.
func sglangBody(q *Request, added []byte) [][]byte {
	switch {
	case q.Path == PathGenerate:
		return q.Body.Without(notGenerates, added)
	case q.Body.Value("rid") != nil:
		return q.Body.Without(notSGLangs, added)
	}
	return q.Body.With(added)
}

func ridMember(members []byte, rid string) []byte {
	if len(members) > 0 {
		members = append(members, ',')
	}
	return openai.AppendString(append(members, `"rid":`...), rid)
}

// rooms tells how many rooms a request needs, and whether they go into a list.
func rooms(b *body.Body) (n int) {
	n = max(b.N, 1)
	if p := gjson.ParseBytes(b.Value("sampling_params")); p.IsObject() { // where /generate has it
		n = max(n, int(min(p.Get("n").Int(), roomsMax+1)))
	}
	for _, name := range []string{"prompt", "text", "input_ids"} {
		if k := body.Batch(b.Value(name)); k > 0 {
			return n * k
		}
	}
	if n > 1 {
		return n
	}
	return 0
}

// bootstrapMembers has a room, or n of them in lists, one for each answer.
func bootstrapMembers(host string, port, n int) []byte {
	quoted := openai.AppendString(nil, host)
	list := func(b []byte, name string, value func(b []byte) []byte) []byte {
		b = append(append(append(b, `"bootstrap_`...), name...), `":`...)
		if n == 0 {
			return value(b)
		}
		b = append(b, '[')
		for i := range n {
			if i > 0 {
				b = append(b, ',')
			}
			b = value(b)
		}
		return append(b, ']')
	}
	b := list(nil, "host", func(b []byte) []byte { return append(b, quoted...) })
	b = list(append(b, ','), "port", func(b []byte) []byte { return fmt.Append(b, port) })
	return list(append(b, ','), "room", func(b []byte) []byte { return fmt.Append(b, rand.Int64()) })
}

// logprobs puts prefill's log probabilities of the prompt's tokens in front of decode's, which has none of those that it did
// not compute. They go through as bytes.
type logprobs struct {
	of map[int64][]byte // the members of prefill's list, by the answer's index
}

const pathLogprobs = "meta_info.input_token_logprobs"

// prefill takes a whole answer of prefill's, or one event of its stream; the first one of each index counts.
func (m *logprobs) prefill(data []byte) {
	if m.of == nil {
		m.of = map[int64][]byte{}
	}
	each(data, func(i int64, v gjson.Result) {
		list := v.Get(pathLogprobs)
		if _, had := m.of[i]; !had && list.IsArray() {
			m.of[i] = bytes.TrimSpace([]byte(list.Raw[1 : len(list.Raw)-1]))
		}
	})
}

// each calls f with an answer, or with all of a batch, and their index.
func each(data []byte, f func(i int64, v gjson.Result)) {
	v := gjson.ParseBytes(data)
	if !v.IsArray() {
		f(v.Get("index").Int(), v)
		return
	}
	i := int64(0)
	v.ForEach(func(_, v gjson.Result) bool {
		f(i, v)
		i++
		return true
	})
}

// decode returns an answer of decode's with prefill's part in it.
func (m *logprobs) decode(data []byte) []byte {
	type cut struct {
		at int
		in []byte
	}
	var cuts []cut
	each(data, func(i int64, v gjson.Result) {
		list := v.Get(pathLogprobs)
		had := m.of[i]
		if len(had) == 0 || !list.IsArray() || list.Index <= 0 || list.Index >= len(data) || data[list.Index] != '[' {
			return
		}
		in := had
		if len(bytes.TrimSpace([]byte(list.Raw[1:len(list.Raw)-1]))) > 0 {
			in = append(bytes.Clone(had), ',')
		}
		cuts = append(cuts, cut{list.Index + 1, in})
	})
	if len(cuts) == 0 {
		return data
	}
	out, from := make([]byte, 0, len(data)+len(cuts)*64), 0
	for _, c := range cuts {
		out = append(append(out, data[from:c.at]...), c.in...)
		from = c.at
	}
	return append(out, data[from:]...)
}
