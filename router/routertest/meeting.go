package routertest

import (
	"sync"
	"time"
)

// meeting is where the two halves of a request find each other, in dialects where engines do so by themselves.
type meeting struct {
	computed   chan struct{} // prefill has the KV cache
	registered chan struct{} // decode has said where it wants it
	moved      chan struct{}
	dropped    chan struct{} // decode has said that it does not want it

	mu   sync.Mutex // guards what follows
	is   map[chan struct{}]bool
	used map[string]*EngineCall // by role
	kept bool                   // prefill holds blocks
}

// meet is one end's coming, by its key, which may serve each end once. Who comes second may ask about the first at once.
func (c *EngineCall) meet() {
	cl := c.Engine.Cluster
	cl.mu.Lock()
	if cl.meetings == nil {
		cl.meetings = map[string]*meeting{}
	}
	m := cl.meetings[c.key]
	if m == nil {
		m = &meeting{computed: make(chan struct{}), registered: make(chan struct{}), moved: make(chan struct{}), dropped: make(chan struct{}),
			is: map[chan struct{}]bool{}, used: map[string]*EngineCall{}}
		cl.meetings[c.key] = m
	}
	cl.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.used[c.Role] != nil {
		cl.violate("engine %s: %s is used a second time for %s", c.Engine.ID, c.key, c.Role)
	}
	c.meeting, m.used[c.Role] = m, c
}

// other is the other end, nil as long as it has not come.
func (m *meeting) other(c *EngineCall) *EngineCall {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.used {
		if o != c {
			return o
		}
	}
	return nil
}

// mark says that something has happened, and moves the KV cache when both ends are ready and prefill has it still.
func (m *meeting) mark(ch chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.is[ch] {
		return
	}
	m.is[ch] = true
	close(ch)
	if m.is[m.computed] && m.is[m.registered] && m.kept && !m.is[m.moved] && !m.is[m.dropped] {
		m.is[m.moved] = true
		close(m.moved)
	}
}

// keep holds prefill's blocks up to their end: moved, dropped, gone or at the end of the lease.
func (m *meeting) keep(e *Engine, lease time.Duration, gone <-chan struct{}) {
	m.mu.Lock()
	m.kept = true
	m.mu.Unlock()
	e.Cluster.hold(blocksPerLease)
	e.wg.Go(func() {
		timer := time.NewTimer(lease)
		defer timer.Stop()
		select {
		case <-m.moved:
		case <-m.dropped:
		case <-gone:
		case <-timer.C:
		case <-e.quit:
		}
		m.mu.Lock()
		m.kept = e.Dialect == "vllm-p2p-nccl" && m.is[m.computed] // decode has it, whatever becomes of prefill
		m.mu.Unlock()
		e.Cluster.hold(-blocksPerLease)
	})
}

// pushPrefillItself is a prefill of a connector that pushes by itself: its blocks are kept behind its answer, for a lease.
func (c *EngineCall) pushPrefillItself() error {
	m := c.meeting
	gone := make(chan struct{})
	m.keep(c.Engine, c.Engine.Lease, gone)
	if err := c.fault(StagePrefill, 0); err != nil {
		close(gone)
		return err
	}
	if c.ctx.Err() != nil { // its scheduler has not finished it, and aborts it
		close(gone)
		return errAbort
	}
	return c.computed()
}

// computed answers a prefill whose KV cache is there for decode.
func (c *EngineCall) computed() error {
	c.meeting.mark(c.meeting.computed)
	if err := c.fault(StageAnswer, 0); err != nil {
		return err
	}
	if err := c.json(c.whole(c.prompt)); err != nil {
		return err
	}
	return c.fault(StageAnswered, 0)
}

// takeItself is decode of such a connector. What its scheduler has seen it lets go of, too, and tells prefill.
func (c *EngineCall) takeItself() error {
	m := c.meeting
	if c.b.Stream {
		c.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		if err := c.write(""); err != nil {
			m.mark(m.dropped)
			return err
		}
	}
	if err := c.fault(StageLoad, 0); err != nil {
		m.mark(m.dropped)
		return err
	}
	c.Engine.Cluster.hold(blocksPerLease)
	defer c.Engine.Cluster.hold(-blocksPerLease)
	m.mark(m.registered)
	select {
	case <-m.moved:
	case <-c.ctx.Done(): // that prefill has ended, nobody tells it
		m.mark(m.dropped)
		return errAbort
	}
	if err := c.fault(StageLoaded, 0); err != nil {
		return err
	}
	return c.generate()
}
