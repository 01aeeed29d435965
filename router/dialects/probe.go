package dialects

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/headrace/headrace/router/upstream"
)

// Prober finds out whether engines live that say nothing while they work. Of the many requests that wait for an engine
// one asks, and all hear the answer. Safe for concurrent use.
type Prober struct {
	client *upstream.Client
	every  time.Duration
	within time.Duration

	running sync.WaitGroup

	mu     sync.Mutex // guards what follows
	probes map[string]*probe
}

// NewProber asks an engine that was silent for `every`, and not more often; one that does not answer within the other
// time counts as dead.
func NewProber(c *upstream.Client, every, within time.Duration) *Prober {
	return &Prober{client: c, every: every, within: within, probes: map[string]*probe{}}
}

// probe is one question to one engine.
type probe struct {
	began time.Time
	done  chan struct{} // closed when err stands
	err   error
}

// ask returns the engine's last probe, a new one if that is old.
func (p *Prober) ask(t upstream.Target) *probe {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := p.probes[t.Addr]; last != nil && (!last.over() || now.Sub(last.began) < p.every) {
		return last
	}
	for addr, old := range p.probes { // workers come and go
		if old.over() && now.Sub(old.began) >= p.every {
			delete(p.probes, addr)
		}
	}
	q := &probe{began: now, done: make(chan struct{})}
	p.probes[t.Addr] = q
	leg := p.client.Open(t, upstream.Request{Get: true, Path: "/health", Accept: "*/*", Patient: true})
	p.running.Go(func() {
		defer close(q.done)
		q.err = p.answer(leg)
	})
	return q
}

// Wait waits for the probes under way. The client's Close ends them.
func (p *Prober) Wait() { p.running.Wait() }

func (p *Prober) answer(leg *upstream.Leg) error {
	ctx, cancel := context.WithTimeout(context.Background(), p.within)
	defer cancel()
	defer leg.Close()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("no answer to /health within %s", p.within)
		case b, ok := <-leg.C:
			if !ok {
				return fmt.Errorf("ask for /health: %w", context.Canceled)
			}
			status, err := b.Status, b.Err
			b.Release()
			switch {
			case err == nil:
				continue
			case err != io.EOF:
				return fmt.Errorf("ask for /health: %w", err)
			case status == 0 || status >= 500:
				return fmt.Errorf("/health says %d", status)
			}
			return nil // an engine without /health answers as well
		}
	}
}

func (q *probe) over() bool {
	select {
	case <-q.done:
		return true
	default:
		return false
	}
}

// errProbe wraps what a probe found.
var errProbe = errors.New("the worker does not live")
