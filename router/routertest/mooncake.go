package routertest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
)

// engineOf is what a data-parallel rank of e calls itself.
func (e *Engine) engineOf(rank int) string { return fmt.Sprintf("engine-%s-%d", e.ID, rank) }

// startBootstrap makes e listen for questions about its ranks.
func (e *Engine) startBootstrap() error {
	var err error
	e.bootstrap.Wire = e.Wire
	e.KVAddr, err = e.bootstrap.listen(func(w http.ResponseWriter, r *http.Request) {
		e.queries.Add(1)
		if r.Method != http.MethodGet || r.URL.Path != "/query" {
			e.Cluster.violate("engine %s: %s %s of its bootstrap server", e.ID, r.Method, r.URL.Path)
			http.NotFound(w, r)
			return
		}
		if e.BootstrapFault != nil {
			if status := e.BootstrapFault(r.Context()); status != http.StatusOK {
				w.WriteHeader(status)
				return
			}
		}
		answer := map[string]any{}
		for rank := range max(e.Ranks, 1) {
			answer[strconv.Itoa(rank)] = map[string]any{"engine_id": e.engineOf(rank), "worker_addr": map[string]any{"0": map[string]string{"0": "tcp://127.0.0.1:1"}}}
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(answer)
	})
	return err
}

// Queries returns how often its bootstrap server was asked.
func (e *Engine) Queries() int { return int(e.queries.Load()) }

// parseMooncake knows both ends' parameters, and the header that says which rank prefills.
func (c *EngineCall) parseMooncake() error {
	header := c.header.Get("X-data-parallel-rank")
	if len(c.Params) == 0 {
		if header != "" {
			return fmt.Errorf("rank %q for a request that is not shared", header)
		}
		return nil
	}
	if err := c.direction(); err != nil {
		return err
	}
	if c.Role == "prefill" {
		p, err := members(c.Params, "do_remote_decode", "do_remote_prefill", "transfer_id")
		if err != nil {
			return err
		}
		if c.rank, err = strconv.Atoi(header); err != nil || c.rank < 0 || c.rank >= max(c.Engine.Ranks, 1) {
			return fmt.Errorf("X-data-parallel-rank %q, the engine has %d", header, max(c.Engine.Ranks, 1))
		}
		return c.meetBy(text(p, "transfer_id"))
	}
	p, err := members(c.Params, "do_remote_decode", "do_remote_prefill", "remote_bootstrap_addr", "remote_engine_id", "transfer_id")
	if err != nil {
		return err
	}
	c.wantPeer(func(peer *Engine) string {
		o := c.meeting.other(c)
		if text(p, "remote_bootstrap_addr") != "http://"+peer.KVAddr || o == nil || text(p, "remote_engine_id") != peer.engineOf(o.rank) {
			return fmt.Sprintf("%s are not about %s", c.Params, peer.ID)
		}
		return ""
	})
	return c.meetBy(text(p, "transfer_id"))
}
