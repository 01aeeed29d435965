package supervise

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

const (
	// readyTimeout is how long a new daemon may take to stand in its predecessor's place.
	readyTimeout = 40 * time.Second
	// endTimeout is how long its predecessor may then go on: longer than a daemon's own drain timeout.
	endTimeout = 75 * time.Second
)

// Upgrade tells how far the replacement of the node daemons is.
type Upgrade struct {
	Count   int      `json:"count"` // how often one was begun
	Running bool     `json:"running"`
	Done    []string `json:"done,omitempty"` // a line for each daemon that was replaced
	Error   string   `json:"error,omitempty"`
}

type upgradeState struct {
	changed chan struct{} // capacity 1: the state file is to be written

	mu sync.Mutex // guards what follows
	u  Upgrade
}

func (s *upgradeState) get() Upgrade {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.u
	u.Done = append([]string(nil), s.u.Done...)
	return u
}

func (s *upgradeState) set(f func(u *Upgrade)) {
	s.mu.Lock()
	f(&s.u)
	s.mu.Unlock()
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// rollNodes replaces the node daemons one after another, each when the one before has ended, and stops at the first that
// cannot be: what was not touched goes on.
func (u *upper) rollNodes(ctx context.Context) {
	begun := false
	u.upgrade.set(func(s *Upgrade) {
		if begun = !s.Running; begun {
			*s = Upgrade{Count: s.Count + 1, Running: true}
		}
	})
	if !begun {
		u.o.Logger.Warn("node daemons are being upgraded already")
		return
	}
	err := func() error {
		for _, p := range u.list() {
			if p.kind != "node" {
				continue
			}
			r, err := u.group.Replace(ctx, p.spec.Name, []string{"--takeover"}, func(ctx context.Context, pid int) error {
				return u.awaitListed(ctx, p.id, pid)
			}, endTimeout)
			if err != nil {
				return err
			}
			u.o.Logger.Info("upgraded "+p.spec.Name, "old", r.Old, "new", r.New, "ready", r.Ready, "drained", r.Drained)
			u.upgrade.set(func(s *Upgrade) {
				s.Done = append(s.Done, fmt.Sprintf("%s: process %d took over from %d in %s, which ended after %s", p.spec.Name, r.New, r.Old,
					r.Ready.Round(time.Millisecond), r.Drained.Round(time.Millisecond)))
			})
		}
		return nil
	}()
	u.upgrade.set(func(s *Upgrade) {
		if s.Running = false; err != nil {
			s.Error = err.Error()
		}
	})
	if err != nil {
		u.o.Logger.Error("upgrade the node daemons", "err", err)
	}
}

// awaitListed waits until the registry names the process as the node.
func (u *upper) awaitListed(ctx context.Context, id string, pid int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("it was not ready within %s", readyTimeout))
	defer cancel()
	for {
		changed := u.table.Changed()
		if n, ok := u.table.Snapshot().Node(id); ok && n.PID == pid {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx))
		}
	}
}
