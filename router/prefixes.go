package router

import (
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/prefix"
)

// PrefixAnswer is what POST /debug/prefixes says about a request: what each worker has of its prompt.
type PrefixAnswer struct {
	Tokens  int             `json:"tokens"`
	Exact   bool            `json:"exact"` // they are the model's tokens, else four bytes each
	Workers []PrefixMatches `json:"workers"`
}

// PrefixMatches is what one worker has of a prompt.
type PrefixMatches struct {
	ID          string `json:"id"`
	Cached      int    `json:"cached_tokens"`
	Approximate bool   `json:"approximate,omitempty"` // by what was routed there, not by what the engine says
}

// register shows both indexes among the router's metrics.
func (p *prompts) register(reg prometheus.Registerer) {
	for name, x := range p.indexes() {
		prometheus.WrapRegistererWith(prometheus.Labels{"of": name}, reg).MustRegister(x)
	}
}

// status is for the page /status: the index of tokens, which engines tell about. nil when there is none.
func (p *prompts) status() *prefix.Status {
	if p == nil {
		return nil
	}
	st := p.index.Status()
	return &st
}

// explainPrefix answers a request's body with what each worker has of its prompt, without serving it.
func (r *Router) explainPrefix(w http.ResponseWriter, req *http.Request) {
	if r.prompts == nil {
		http.Error(w, fmt.Sprintf("the policy %s does not look at prefixes", r.cfg.Policy.Name()), http.StatusNotFound)
		return
	}
	raw, err := io.ReadAll(http.MaxBytesReader(w, req.Body, int64(r.cfg.MaxBodyBytes)))
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		http.Error(w, fmt.Sprintf("the body is longer than %d bytes", large.Limit), http.StatusRequestEntityTooLarge)
		return
	}
	if err != nil {
		return // the client has gone
	}
	b, refused := body.Parse(raw)
	if refused != nil {
		http.Error(w, refused.Error(), refused.Status)
		return
	}
	path := req.URL.Query().Get("path")
	if path == "" {
		path = "/v1/chat/completions"
		if b.Value("messages") == nil {
			path = "/v1/completions"
		}
	}
	p := r.prompts.of(path, b.Model, b)
	if p == nil {
		http.Error(w, "the body has no prompt", http.StatusBadRequest)
		return
	}
	defer p.done()
	v := r.fleet.view()
	answer := PrefixAnswer{Tokens: p.length, Exact: p.exact, Workers: []PrefixMatches{}}
	for i, m := range p.matches(v, b.Model, nil) {
		answer.Workers = append(answer.Workers, PrefixMatches{ID: v.Workers[i].ID, Cached: m.Tokens, Approximate: m.Approximate})
	}
	writeJSON(w, answer)
}
