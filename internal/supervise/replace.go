package supervise

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"
)

// Replacement is what replacing a child's process took.
type Replacement struct {
	Old, New int           // processes
	Ready    time.Duration // until the new one serves
	Drained  time.Duration // until the old one has ended
}

// Replace starts a second process of a child, with extra arguments, which is to take over from the first. When ready
// answers nil for it, it is the child's process from then on, and the first is waited for: it ends by itself, or is
// made to after its time. If the second one ends or is not ready in time, nothing has changed.
func (g *Group) Replace(ctx context.Context, name string, extra []string, ready func(ctx context.Context, pid int) error, drain time.Duration) (r Replacement, err error) {
	g.mu.Lock()
	c := g.children[name]
	g.mu.Unlock()
	if c == nil {
		return r, fmt.Errorf("replace %s: there is no such part", name)
	}
	c.mu.Lock()
	old, busy := c.now, c.changing != nil
	if old != nil && !busy {
		c.changing = make(chan struct{})
	}
	c.mu.Unlock()
	switch {
	case busy:
		return r, fmt.Errorf("replace %s: it is being replaced already", name)
	case old == nil:
		return r, fmt.Errorf("replace %s: it is being restarted just now", name)
	}
	decided := sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		close(c.changing)
		c.changing = nil
	})
	defer decided()
	start := time.Now()
	next, err := c.launch(append(append([]string(nil), c.spec.Args...), extra...))
	if err != nil {
		return r, fmt.Errorf("replace %s: %w", name, err)
	}
	r = Replacement{Old: old.cmd.Process.Pid, New: next.cmd.Process.Pid}
	if err := c.awaitReady(ctx, next, ready); err != nil {
		return r, fmt.Errorf("replace %s (process %d goes on): %w", name, r.Old, err)
	}
	r.Ready = time.Since(start)
	c.setNow(next)
	decided()
	select {
	case c.news <- struct{}{}:
	default:
	}
	timer := time.NewTimer(drain)
	defer timer.Stop()
	select {
	case <-old.ended:
	case <-timer.C:
		g.log.Warn(name+" was replaced and does not end, ending it", "pid", r.Old, "after", drain)
		_ = syscall.Kill(-r.Old, syscall.SIGTERM)
		waitAtMost(old.ended, c.spec.Grace)
		_ = old.cmd.Process.Kill()
		<-old.ended
	case <-c.stop:
		return r, fmt.Errorf("replace %s: it is being stopped", name)
	case <-ctx.Done():
		return r, fmt.Errorf("replace %s: %w", name, ctx.Err())
	}
	r.Drained = time.Since(start)
	return r, nil
}

// awaitReady waits until a process serves, and kills one that does not.
func (c *child) awaitReady(ctx context.Context, l *life, ready func(ctx context.Context, pid int) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var err error
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		err = ready(ctx, l.cmd.Process.Pid)
	}()
	why := ""
	select {
	case <-answered:
	case <-l.ended:
		waitAtMost(l.drained, time.Second)
		why = Exit{Err: l.err, LastLine: c.sink.lastLine()}.Reason()
	case <-c.stop:
		why = "it is being stopped"
	}
	cancel()
	<-answered
	if why != "" {
		err = errors.New(why)
	}
	if err != nil {
		_ = l.cmd.Process.Kill()
		<-l.ended
	}
	return err
}
