package router

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/headrace/headrace/router/admission"
	"github.com/headrace/headrace/router/collect"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/prefix"
)

// decisionsKept is how many decisions /debug/decisions shows.
const decisionsKept = 256

// decisionRecord is a decision for people to read.
type decisionRecord struct {
	Time         time.Time           `json:"time"`
	ID           string              `json:"id"`
	RequestID    string              `json:"request_id"`
	Model        string              `json:"model"`
	Policy       string              `json:"policy"`
	Dialect      string              `json:"dialect"`
	Dispatch     int                 `json:"dispatch"`
	PromptTokens int64               `json:"prompt_tokens_estimated"`
	Resume       int                 `json:"resume_tokens"`
	Prefill      string              `json:"prefill,omitempty"`
	Decode       string              `json:"decode,omitempty"`
	Whole        string              `json:"whole,omitempty"`
	Reason       string              `json:"reason"`
	Rejected     []pairing.Rejection `json:"rejected,omitempty"`
	// Exact: the prompt's tokens are known, not estimated from its bytes.
	Exact        bool             `json:"prompt_tokens_exact"`
	Cached       int64            `json:"cached_tokens"`
	Weighed      int              `json:"weighed"` // choices, of which Options shows the best
	Options      []pairing.Option `json:"options,omitempty"`
	Moves        []moveRecord     `json:"moves,omitempty"` // of the stream, to other workers
	Result       string           `json:"result"`
	Failure      string           `json:"failure,omitempty"`
	Milliseconds float64          `json:"ms"`
}

// decisionRing keeps the last decisions.
type decisionRing struct {
	mu   sync.Mutex
	ring [decisionsKept]decisionRecord
	next int
}

// add notes a decision, and returns its number.
func (r *decisionRing) add(q *request, d *pairing.Decision, now time.Time) int {
	policy, kind := q.r.cfg.Policy.Name(), "pair"
	if d.Whole != nil {
		kind = "whole"
	}
	q.r.metrics.decided.of([2]string{policy, kind}).Inc()
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.next
	r.next++
	rec := &r.ring[n%decisionsKept]
	*rec = decisionRecord{
		Time: now, ID: q.id, RequestID: q.dreq.RequestID, Model: q.body.Model, Policy: policy, Dialect: dialectOf(*d), Dispatch: q.dispatches,
		PromptTokens: q.promptTokens(), Resume: q.given(), Reason: d.Reason, Rejected: d.Rejected, Result: "running",
		Exact: q.prompt != nil && q.prompt.exact, Cached: d.CachedTokens, Weighed: d.Weighed, Options: d.Options,
	}
	if d.Whole != nil {
		rec.Whole = d.Whole.ID
	} else {
		rec.Prefill, rec.Decode = d.Prefill.ID, d.Decode.ID
	}
	return n
}

// of is a copy of a decision, nil when so many came since that it is gone.
func (r *decisionRing) of(n int) *decisionRecord {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next-n > decisionsKept {
		return nil
	}
	rec := r.ring[n%decisionsKept]
	return &rec
}

var resultNames = map[dialects.Result]string{
	dialects.Finished: "finished", dialects.Refused: "refused", dialects.Failed: "failed", dialects.Cancelled: "cancelled", dialects.SinkFailed: "client write failed",
}

func (r *decisionRing) end(n int, out *dialects.Outcome, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next-n > decisionsKept {
		return
	}
	rec := &r.ring[n%decisionsKept]
	rec.Result = resultNames[out.Result]
	rec.Failure = out.Reason
	if out.Err != nil {
		rec.Failure = fmt.Sprintf("%s: %s", out.Reason, out.Err)
	}
	rec.Milliseconds = float64(now.Sub(rec.Time).Microseconds()) / 1000
}

// list returns copies, the latest first; of one request when id is not empty.
func (r *decisionRing) list(id string) []decisionRecord {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := []decisionRecord{}
	for i := r.next - 1; i >= 0 && i >= r.next-decisionsKept; i-- {
		rec := &r.ring[i%decisionsKept]
		if id == "" || rec.ID == id || rec.RequestID == id {
			out = append(out, *rec)
		}
	}
	return out
}

// Status is what /status shows.
type Status struct {
	Version  string         `json:"version,omitempty"`
	Started  time.Time      `json:"started"`
	Stopping bool           `json:"stopping"`
	Policy   string         `json:"policy"`
	Conns    int            `json:"client_conns"`
	Active   int            `json:"requests_active"`
	Queued   int            `json:"requests_queued"`
	Sessions int            `json:"sessions"`
	Legs     int            `json:"legs"`
	Idle     int            `json:"worker_conns_idle"`
	Workers  []WorkerStatus `json:"workers"`
	// Channels are those between node daemons over which something was sent.
	Channels []ChannelStatus `json:"channels,omitempty"`
	// Queue is what waits for its turn, and how many answers are being made.
	Queue admission.Counts `json:"admission"`
	// HeldBytes is the memory of requests' bodies, but for those of 16 KiB and less.
	HeldBytes int64 `json:"held_bytes"`
	// Prefixes is what is known of workers' caches by the model's tokens; nil when the policy does not look at prefixes.
	Prefixes *prefix.Status `json:"prefixes,omitempty"`
}

// WorkerStatus is a worker as this router sees it.
type WorkerStatus struct {
	ID       string `json:"id"`
	Role     string `json:"role"`
	Model    string `json:"model"`
	Dialect  string `json:"dialect"`
	Addr     string `json:"addr"`
	NodeID   string `json:"node_id,omitempty"`
	NodeData string `json:"node_data,omitempty"`
	// KVTokenBytes is what a token takes of its KV cache, as its node daemon knows it; 0: not known.
	KVTokenBytes  float64 `json:"kv_token_bytes,omitempty"`
	PrefillTokens int64   `json:"prefill_tokens"`
	Prefills      int64   `json:"prefills"`
	Decodes       int64   `json:"decodes"`
	Cooling       string  `json:"cooling,omitempty"`
	CoolingMS     int64   `json:"cooling_ms,omitempty"`
	// SlowTimes is how long its first tokens take in relation to the median of its peers; 0: not known, or not asked for (--eject-slow).
	SlowTimes float64 `json:"slow_times,omitempty"`
	// Speeds are what this router has learned of it.
	Speeds pairing.Speeds `json:"speeds"`
	LoRAs  []string       `json:"loras,omitempty"`
	Weight *float64       `json:"weight,omitempty"` // of the traffic, 1 when it is not there
	// Engine is what it says of itself.
	Engine *collect.Status `json:"engine,omitempty"`
}

// Status is a snapshot.
func (r *Router) Status() Status {
	s := Status{Version: r.cfg.Version, Started: r.started, Policy: r.cfg.Policy.Name(), Workers: []WorkerStatus{}}
	r.mu.Lock()
	s.Stopping, s.Active, s.Conns = r.stopping, r.active, len(r.conns)
	r.mu.Unlock()
	s.Queue = r.admission.Counts()
	s.Queued, s.HeldBytes = s.Queue.Waiting, r.bodies.held.Load()
	s.Legs, s.Idle = r.client.Counts()
	s.Sessions = r.sessions.count()
	s.Prefixes = r.prompts.status()
	s.Channels = r.fleet.ways.status()
	v := r.fleet.view()
	defer r.fleet.viewed(v)
	for _, c := range v.Workers {
		w := WorkerStatus{ID: c.ID, Role: string(c.Role), Model: c.Model, Dialect: c.Dialect, Addr: c.Addr, NodeID: c.NodeID, NodeData: c.NodeData, KVTokenBytes: r.fleet.ways.tokenBytes(c.Worker),
			PrefillTokens: c.Load.PrefillTokens, Prefills: c.Load.Prefills, Decodes: c.Load.Decodes, Engine: r.fleet.engines.Status(c.ID), Speeds: c.Speeds, LoRAs: c.LoRAs, Weight: c.Weight}
		if left := c.CoolUntil.Sub(v.Now); left > 0 {
			w.Cooling, w.CoolingMS = c.CoolReason, left.Milliseconds()
		}
		w.SlowTimes = r.fleet.slowTimes(c.ID)
		s.Workers = append(s.Workers, w)
	}
	return s
}

// ServeAdmin serves /metrics, /status, /debug/decisions and /healthz on ln until Shutdown. Who
// comes from another host must show the cluster key (internal/clusterauth) unless Config.AdminOpen; it belongs on a loopback address all the same.
// Names in Host that are not in Config.AdminHosts are refused.
func (r *Router) ServeAdmin(ln net.Listener) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r.cfg.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, r.Status()) })
	mux.HandleFunc("GET /debug/decisions", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, r.decisions.list("")) })
	mux.HandleFunc("GET /debug/requests", r.listRequests)
	mux.HandleFunc("GET /debug/requests/{id}", r.showRequest)
	mux.HandleFunc("POST /debug/prefixes", r.explainPrefix)
	mux.HandleFunc("GET "+PathPrefixes, r.servePrefixes)
	mux.HandleFunc("GET /debug/decisions/{id}", func(w http.ResponseWriter, req *http.Request) {
		list := r.decisions.list(req.PathValue("id"))
		if len(list) == 0 {
			http.Error(w, "no decision about this request is kept", http.StatusNotFound)
			return
		}
		writeJSON(w, list)
	})
	srv := &http.Server{Handler: r.guarded(mux), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	r.mu.Lock()
	if r.stopping {
		r.mu.Unlock()
		return errors.Join(errors.New("serve admin: the router stops"), ln.Close())
	}
	r.admins = append(r.admins, srv)
	r.served.Add(1)
	r.mu.Unlock()
	defer r.served.Done()
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve admin on %s: %w", ln.Addr(), err)
	}
	return nil
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", contentJSON)
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(v)
}
