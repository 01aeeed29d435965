package status

import (
	"fmt"
	"io"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/sidecar"
)

// Worker is a listed worker.
type Worker struct {
	registry.Worker
	Status  *WorkerStatus `json:"status,omitempty"`  // of Headrace's own
	Figures *Figures      `json:"figures,omitempty"` // of engines of another kind
	Error   string        `json:"error,omitempty"`
	// Collected is what the router that looked last heard of it.
	Collected *Collected `json:"collected,omitempty"`
	// LeftAlone is why a router sends it nothing just now, by its circuit breaker.
	LeftAlone string `json:"left_alone,omitempty"`
}

// Collected is what is shown of a worker in a router's /status.
type Collected struct {
	AgeMS   int64   `json:"age_ms"`
	Stale   bool    `json:"stale,omitempty"`
	Running int64   `json:"running"`
	Waiting int64   `json:"waiting"`
	KVUsage float64 `json:"kv_usage"` // 0 to 1, -1 where it is not said
	Problem string  `json:"problem,omitempty"`
	Events  []struct {
		State  string `json:"state"`
		Blocks int64  `json:"blocks"` // that the engine has, by its KV events
	} `json:"events,omitempty"`
}

// WorkerStatus is what is shown of a worker's /status.
type WorkerStatus struct {
	Running           int    `json:"running"`
	Waiting           int    `json:"waiting"`
	Node              string `json:"node"`
	NodeProblem       string `json:"node_problem,omitempty"` // why it has no daemon
	BlocksTotal       int    `json:"blocks_total"`
	BlocksFree        int    `json:"blocks_free"`
	BlocksCached      int    `json:"blocks_cached"`
	BlocksLeased      int    `json:"blocks_leased"`
	BlocksQuarantined int    `json:"blocks_quarantined"`
}

// problem is what to show as a part's state.
func (w *Worker) problem() string {
	switch {
	case w.Error == "" && w.Status != nil:
		return w.Status.NodeProblem
	case w.Error == "" && w.Dialect == sidecar.DialectVLLM && w.NodeData == "":
		return "its connector is not with a node daemon: it serves whole requests only"
	}
	return w.Error
}

func (r *Report) printWorkers(t io.Writer) {
	fmt.Fprintf(t, "\nWORKER\tROLE\tMODEL\tNODE\tBLOCKS USED/FREE/LEASED/OF\tRUNNING\tWAITING\tKV\tPID\tUP\tSTATE\n")
	for _, w := range r.Workers {
		blocks, running, waiting, usage := "-", "-", "-", "-"
		if c := w.Collected; c != nil && !c.Stale {
			running, waiting = fmt.Sprint(c.Running), fmt.Sprint(c.Waiting)
			if c.KVUsage >= 0 {
				usage = fmt.Sprintf("%.0f %%", 100*c.KVUsage)
			}
		}
		if s := w.Status; s != nil {
			blocks = fmt.Sprintf("%d/%d/%d/%d", s.BlocksTotal-s.BlocksFree, s.BlocksFree, s.BlocksLeased, s.BlocksTotal)
			running, waiting = fmt.Sprint(s.Running), fmt.Sprint(s.Waiting)
		}
		if f := w.Figures; f != nil {
			blocks, running, waiting = f.blocks(w.Blocks), count(f.Running), count(f.Waiting)
			if f.CacheUsage != nil {
				usage = fmt.Sprintf("%.0f %%", 100**f.CacheUsage)
			}
		}
		node := w.NodeID
		if node == "" {
			node = "none"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n",
			w.ID, w.Role, w.Model, node, blocks, running, waiting, usage, w.PID, since(w.Started), state(w.problem())+w.share())
	}
}

// share says how much of the traffic the worker is to get, if that is not all, and why it gets none.
func (w *Worker) share() string {
	left := ""
	if w.LeftAlone != "" {
		left = ", left alone: " + w.LeftAlone
	}
	switch {
	case w.Weight == nil || *w.Weight == 1:
		return left
	case *w.Weight == 0:
		return ", drains" + left
	}
	return fmt.Sprintf(", weight %.3g", *w.Weight) + left
}
