package router

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/prefix"
	"github.com/headrace/headrace/router/tokens"
)

// Tokens tells what an engine makes of a request's prompt.
type Tokens interface {
	// Prompt puts the prompt's token ids into p, in place of what is there. An error means that they cannot be told, of this
	// request or at all.
	Prompt(p *tokens.Prompt, endpoint string, body []byte) error
}

const (
	// indexBytes and guessBytes bound what is known of workers' caches.
	indexBytes = 256 << 20
	guessBytes = 64 << 20
	// A prompt's tokens are kept for the next request, unless there are very many.
	pooledTokensMax = 1 << 20
)

// prompts finds out how much of a request's prompt each worker has. Where the model's tokens can be told, index has the answer,
// by what engines publish or what was routed to them. Where not, bytes of the request take the place of tokens, four for one,
// and guesses has what was routed.
type prompts struct {
	tokens  map[string]Tokens // by model
	index   *prefix.Index
	guesses *prefix.Index
}

func newPrompts(cfg *Config) (*prompts, error) {
	index, err := prefix.New(prefix.Config{Bytes: indexBytes})
	if err != nil {
		return nil, fmt.Errorf("configure router: %w", err)
	}
	guesses, err := prefix.New(prefix.Config{Bytes: guessBytes})
	if err != nil {
		return nil, fmt.Errorf("configure router: %w", err)
	}
	return &prompts{tokens: cfg.Tokens, index: index, guesses: guesses}, nil
}

// keep forgets what is not of the fleet.
func (p *prompts) keep(order []*member) {
	workers := make([]prefix.Worker, len(order))
	for i, m := range order {
		workers[i] = prefix.Worker{ID: m.w.ID, Incarnation: m.w.Incarnation, BlockTokens: m.w.BlockTokens, Blocks: int64(m.w.Blocks)}
	}
	p.index.Keep(workers)
	p.guesses.Keep(workers)
}

// prompt is a request's, as far as pairing asks about it. It is not changed once it is made, so that all choices share it.
type prompt struct {
	tokens tokens.Prompt
	length int // in tokens
	exact  bool
	seed   prefix.Seed
	in     *prefix.Index
}

var usedPrompts = sync.Pool{New: func() any { return new(prompt) }}

// of reads a request's prompt; nil when there is nothing to read.
func (p *prompts) of(path, model string, b *body.Body) *prompt {
	out := usedPrompts.Get().(*prompt)
	out.in, out.exact, out.seed = p.guesses, false, prefix.Seed{Salt: text(b.Value("cache_salt"))}
	t := p.tokens[model]
	if t == nil {
		t = p.tokens[""]
	}
	if t != nil && t.Prompt(&out.tokens, path, b.Raw()) == nil {
		if out.length = out.tokens.Len(); out.length > 0 {
			out.exact, out.in = true, p.index
			return out
		}
	}
	out.tokens.Reset()
	out.tokens.Own = pack(out.tokens.Own, model, b)
	out.tokens.Parts = append(out.tokens.Parts, tokens.Part{IDs: out.tokens.Own})
	if out.length = len(out.tokens.Own); out.length == 0 {
		out.done()
		return nil
	}
	return out
}

// done gives the prompt's memory to the next one. Nobody may use it afterwards.
func (p *prompt) done() {
	if p != nil && cap(p.tokens.Own) <= pooledTokensMax {
		p.tokens.Reset()
		usedPrompts.Put(p)
	}
}

// text is a JSON string's value, "" for anything else.
func text(raw []byte) (s string) {
	if len(raw) > 2 && raw[0] == '"' && json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// promptMembers are those that a prompt is made of, in about the order in which templates put them.
var promptMembers = [...]string{"tools", "instructions", "messages", "prompt", "input"}

// pack makes numbers of the bytes that the prompt is made of. What differs between two requests at some byte differs from there on.
// The model comes first, since all models' requests are kept in one index.
func pack(dst []uint32, model string, b *body.Body) []uint32 {
	word, n := [4]byte{}, 0
	add := func(s []byte) {
		for n > 0 && len(s) > 0 {
			word[n] = s[0]
			s = s[1:]
			if n++; n == len(word) {
				dst, n = append(dst, binary.LittleEndian.Uint32(word[:])), 0
			}
		}
		for ; len(s) >= len(word); s = s[len(word):] {
			dst = append(dst, binary.LittleEndian.Uint32(s))
		}
		n += copy(word[n:], s)
	}
	add([]byte(model))
	add([]byte{0})
	found := false
	for _, name := range promptMembers {
		if v := b.Value(name); v != nil {
			add(v)
			found = true
		}
	}
	if !found {
		return dst[:0]
	}
	return dst
}

// matches tells what each of the candidates has of the prompt; out takes the answers if there is room in it.
func (p *prompt) matches(v *pairing.View, model string, out []prefix.Match) []prefix.Match {
	var names [16]string
	ids := names[:0]
	lora := false
	for i := range v.Workers {
		w := v.Workers[i].Worker
		ids = append(ids, w.ID)
		lora = lora || w.Model != model && w.Serves(model)
	}
	seed := p.seed
	if lora {
		seed.LoRA = model
	}
	if len(ids) > len(out) {
		out = nil
	}
	return p.in.LookupParts(p.tokens.Parts, seed, ids, out)
}

// fill tells each candidate how much of the prompt it has.
func (p *prompt) fill(v *pairing.View, model string) {
	var room [16]prefix.Match
	for i, m := range p.matches(v, model, room[:]) {
		v.Workers[i].CachedTokens = int64(m.Tokens)
	}
}

// routed notes that workers are about to have the prompt.
func (p *prompt) routed(d pairing.Decision, model string) {
	for _, w := range [...]*pairing.Worker{d.Prefill, d.Decode, d.Whole} {
		if w == nil {
			continue
		}
		seed := p.seed
		if w.Model != model {
			seed.LoRA = model
		}
		p.in.RoutedParts(w.ID, p.tokens.Parts, seed)
	}
}
