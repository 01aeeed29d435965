package operate

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/planner"
)

// Status is what /status of a planner shows.
type Status struct {
	Namespace string         `json:"namespace"`
	Model     string         `json:"model"`
	Leader    bool           `json:"leader"` // of the planners of this namespace and model; the others stand by
	Planner   string         `json:"planner"`
	Connector string         `json:"connector"`
	DryRun    bool           `json:"dry_run,omitempty"`
	Limits    planner.Limits `json:"limits"`
	IntervalS float64        `json:"interval_s"`
	Looked    time.Time      `json:"looked,omitzero"`   // at the cluster, the last time
	Problem   string         `json:"problem,omitempty"` // why nothing is decided
	GPUs      int            `json:"gpus"`              // that engines have, those that start and drain included
	Pools     []PoolStatus   `json:"pools"`
	Measured  Measured       `json:"measured"`
	Engines   []Record       `json:"engines"`
	Decisions []Decided      `json:"decisions"` // the latest first
}

// PoolStatus is a pool as it was seen the last time.
type PoolStatus struct {
	Role string `json:"role"`
	planner.Pool
}

// Status is a copy.
func (o *Operator) Status() Status {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.status
}

func (o *Operator) tell(f func(s *Status)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f(&o.status)
	o.cfg.Metrics.show(&o.status)
}

// show makes a new status of what was seen.
func (o *Operator) show(obs *planner.Observation, c *connector.Cluster) {
	gpus := o.aside(c)
	engines := make([]Record, 0, len(o.state.Engines))
	for _, r := range o.state.Engines {
		gpus += o.each(r.Role)
		engines = append(engines, *r)
	}
	pools := make([]PoolStatus, 0, 2)
	for _, role := range o.roles() {
		pools = append(pools, PoolStatus{role, *poolOf(obs, role)})
	}
	now, list, measured := o.now(), o.decisions(), o.meter.told
	o.tell(func(s *Status) {
		s.Looked, s.GPUs, s.Pools, s.Measured, s.Engines, s.Decisions = now, gpus, pools, measured, engines, list
	})
}

// decisions are copies, the latest first.
func (o *Operator) decisions() []Decided {
	list := make([]Decided, 0, len(o.state.Decisions))
	for i := len(o.state.Decisions) - 1; i >= 0; i-- {
		list = append(list, *o.state.Decisions[i])
	}
	return list
}

// ServeHTTP answers with the status.
func (o *Operator) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(o.Status())
}
