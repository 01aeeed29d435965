// Package routers asks routers what they have given to whom. It must not change anything there, and knows no more of a router than
// its admin address and the form of its /status.
package routers

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/adminpage"
	"github.com/headrace/headrace/internal/clusterauth"
	"github.com/headrace/headrace/internal/registry"
)

// Worker is a worker as a router sees it.
type Worker struct {
	ID            string   `json:"id"`
	NodeID        string   `json:"node_id"`
	Prefills      int64    `json:"prefills"`       // requests of this router that it prefills
	Decodes       int64    `json:"decodes"`        // and those that it decodes
	PrefillTokens int64    `json:"prefill_tokens"` // of the first, what is not cached
	Weight        *float64 `json:"weight"`
	Engine        *Engine  `json:"engine"`         // what it says of itself; nil before it said anything
	KVTokenBytes  float64  `json:"kv_token_bytes"` // that a token takes of its KV cache; 0: not known
}

// Engine is what a worker's metrics say.
type Engine struct {
	Stale   bool    `json:"stale"`
	Running int64   `json:"running"`
	Waiting int64   `json:"waiting"`
	KVUsage float64 `json:"kv_usage"` // -1: not said
	// ReadAt is when that was read, by the router's clock.
	ReadAt       time.Time `json:"read_at"`
	PrefixHits   int64     `json:"prefix_hits"`   // tokens
	ExternalHits int64     `json:"external_hits"` // tokens
	Blocks       int64     `json:"blocks"`
	BlockTokens  int64     `json:"block_tokens"`
	Timing       *Timing   `json:"timing"` // nil: not said
}

// Timing is what a worker has timed since it started, added up.
type Timing struct {
	Gaps           int64   `json:"gaps"` // between tokens of an answer
	GapSeconds     float64 `json:"gap_seconds"`
	Prefills       int64   `json:"prefills"` // prompts computed
	PrefillSeconds float64 `json:"prefill_seconds"`
	QueueSeconds   float64 `json:"queue_seconds"` // that prompts waited
	PromptTokens   int64   `json:"prompt_tokens"` // computed
	Cached         bool    `json:"cached_too"`    // PromptTokens may count those too that needed no computing
}

// Channel is a channel between two node daemons.
type Channel struct {
	From      string  `json:"from"`
	To        string  `json:"to"`
	SpeedBps  float64 `json:"speed_bytes_per_s"` // of sending while there was something to send; 0: not measured yet
	SentBytes uint64  `json:"sent_bytes"`        // since it was opened
}

// Drains tells whether the router gives it nothing more.
func (w *Worker) Drains() bool { return w.Weight != nil && *w.Weight == 0 }

// Status is what one router says. Err is why it does not.
type Status struct {
	Router   registry.Router `json:"-"`
	Stopping bool            `json:"stopping"`
	Workers  []Worker        `json:"workers"`
	Channels []Channel       `json:"channels"`
	Err      error           `json:"-"`
}

// Worker finds one; nil is that the router does not know it, and gives it nothing.
func (s *Status) Worker(id string) *Worker {
	for i := range s.Workers {
		if s.Workers[i].ID == id {
			return &s.Workers[i]
		}
	}
	return nil
}

// Asker asks routers, with the cluster key of its context (clusterauth.WithKey) if there is one. The zero value is ready.
type Asker struct {
	once   sync.Once
	client *http.Client
}

// Ask asks all routers at once.
func (a *Asker) Ask(ctx context.Context, list []registry.Router) []Status {
	out := make([]Status, len(list))
	var wg sync.WaitGroup
	for i, r := range list {
		wg.Go(func() {
			out[i].Err = a.Get(ctx, r, "/status", &out[i])
			out[i].Router = r
		})
	}
	wg.Wait()
	return out
}

// Get asks one router for a page in JSON.
func (a *Asker) Get(ctx context.Context, r registry.Router, path string, into any) error {
	a.once.Do(func() { a.client = &http.Client{Timeout: adminpage.Timeout, Transport: &clusterauth.Transport{}} })
	return adminpage.Get(ctx, a.client, r.Admin, path, into)
}

// Close gives the connections back.
func (a *Asker) Close() {
	if a.client != nil {
		a.client.CloseIdleConnections()
	}
}

// Undrained says why a worker may still have requests, "" if it has none. One look that finds none is not enough: a request may be on its
// way to it.
func Undrained(list []Status, id string) string {
	for i := range list {
		s := &list[i]
		if s.Err != nil {
			return fmt.Sprintf("router %s does not say what it has there: %s", s.Router.ID, s.Err)
		}
		w := s.Worker(id)
		switch {
		case w == nil:
		case !w.Drains():
			return fmt.Sprintf("router %s has not heard of it", s.Router.ID)
		case w.Prefills+w.Decodes > 0:
			return fmt.Sprintf("router %s has %d requests there", s.Router.ID, w.Prefills+w.Decodes)
		}
	}
	return ""
}

// Quiet is how many looks in a row must find nothing before a worker is drained.
const Quiet = 2
