package engine

import "github.com/headrace/headrace/worker/api"

// Status is a snapshot of the engine as of its last step, for people and for `headrace status`.
type Status struct {
	Role        string `json:"role,omitempty"`
	Node        string `json:"node,omitempty"`         // id of the connected daemon, "" while there is none
	NodeProblem string `json:"node_problem,omitempty"` // why there is none
	Running     int    `json:"running"`
	Waiting     int    `json:"waiting"`
	Fencing     int    `json:"fencing"` // ended requests whose blocks wait for their fence

	BlocksTotal       int `json:"blocks_total"`
	BlocksFree        int `json:"blocks_free"`   // held by nobody; includes the cached ones
	BlocksCached      int `json:"blocks_cached"` // free, and findable by prefix
	BlocksLeased      int `json:"blocks_leased"` // a peer may read or write them
	BlocksQuarantined int `json:"blocks_quarantined"`

	Counters api.Stats `json:"counters"`
}

// Model, Stats and Status make the engine an api.Engine. They are safe to call from any goroutine.
func (e *Engine) Model() api.ModelInfo { return e.cfg.Info }

// Stats answers a scrape.
func (e *Engine) Stats() api.Stats { return e.stats.Load().Counters }

// Status is a Status.
func (e *Engine) Status() any {
	st := e.Snapshot()
	return &st
}

// Snapshot is Status with its type.
func (e *Engine) Snapshot() Status {
	st := *e.stats.Load()
	st.Node = e.link.node()
	if p := e.link.problem.Load(); p != nil && st.Node == "" {
		st.NodeProblem = *p
	}
	return st
}

func (e *Engine) publish() {
	st := &Status{
		Role:        e.cfg.Role,
		BlocksTotal: e.pool.Total(), BlocksFree: e.pool.Free(), BlocksCached: e.pool.Cached(),
		BlocksQuarantined: e.quarantined,
		Waiting:           len(e.waiting), Running: len(e.active), Fencing: len(e.fencing),
	}
	for _, s := range e.active {
		if s.lease != nil {
			st.BlocksLeased += len(s.blocks)
		}
	}
	for s := range e.fencing {
		st.BlocksLeased += len(s.blocks)
	}
	st.Counters = api.Stats{
		Running: st.Running, Waiting: st.Waiting,
		KVUsage:       float64(st.BlocksTotal-st.BlocksFree) / float64(st.BlocksTotal),
		PrefixQueries: e.count.prefixQueries, PrefixHits: e.count.prefixHits,
		ExternalQueries: e.count.externalQueries, ExternalHits: e.count.externalHits,
		PromptTokens: e.count.prefilled, GenerationTokens: e.count.generation,
		Preemptions: e.count.preemptions,
	}
	e.stats.Store(st)
}
