package connector

import (
	"context"

	"github.com/headrace/headrace/internal/supervise"
)

// Local has engines started and stopped by the `headrace up` of this machine, from its command template. They live on when the planner dies.
type Local struct{ up *supervise.Control }

// NewLocal speaks with the `headrace up` whose socket lies at path.
func NewLocal(path string) *Local { return &Local{supervise.NewControl(path)} }

// Name is local.
func (l *Local) Name() string { return "local" }

// Cluster asks what runs.
func (l *Local) Cluster(ctx context.Context) (*Cluster, error) {
	e, err := l.up.Engines(ctx)
	if err != nil {
		return nil, err
	}
	c := &Cluster{Slots: e.Slots, Host: "this machine", FreeRAM: e.FreeRAM, EngineRAM: e.EngineRAM, Each: map[string]int{Prefill: e.Each["prefill"], Decode: e.Each["decode"], Whole: e.Each["decode"]}}
	for _, x := range e.Engines {
		role := x.Role
		if e.Whole {
			role = Whole
		}
		c.Engines = append(c.Engines, Engine{Name: x.Name, ID: x.ID, Role: role, GPUs: x.GPUs, Stopping: x.Stopping, Says: x.LastLine})
	}
	return c, nil
}

// Start starts an engine.
func (l *Local) Start(ctx context.Context, e Engine) error {
	role := e.Role
	if role == Whole {
		role = Decode // as `headrace up` counts those that do both
	}
	return l.up.Start(ctx, supervise.EngineWish{Name: e.Name, Role: role, GPUs: e.GPUs})
}

// Stop ends an engine.
func (l *Local) Stop(ctx context.Context, e Engine) error { return l.up.Stop(ctx, e.Name) }

// Close gives the connections back.
func (l *Local) Close() { l.up.Close() }

var _ Connector = (*Local)(nil)
