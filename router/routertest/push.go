package routertest

import (
	"time"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/transfer/ticket"
)

// Recall is what the router asks a daemon for: the ticket is void, whoever holds blocks for it lets go.
func (c *Cluster) Recall(d *pairing.Worker, t []byte) {
	l := c.asked("recall", d, t)
	if l == nil {
		return
	}
	c.mu.Lock()
	c.recalls++
	c.mu.Unlock()
	l.end("recalled")
}

// Check is what the router asks two daemons for: the ticket is void unless it is presented.
func (c *Cluster) Check(_, d *pairing.Worker, t []byte) {
	l := c.asked("check", d, t)
	if l == nil {
		return
	}
	select {
	case <-l.presented:
	default:
		l.end("nobody presented it")
	}
}

// asked finds the lease of a ticket that a daemon is asked about.
func (c *Cluster) asked(what string, d *pairing.Worker, t []byte) *lease {
	got, err := ticket.Verify(Key, t, time.Now())
	if err != nil {
		c.violate("%s: %v", what, err)
		return nil
	}
	if d.NodeData != dataAddr(got.DEngine) {
		c.violate("%s at %s of a ticket for %s", what, d.NodeData, got.DEngine)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.leases[got.Nonce]
	if l == nil {
		l = newLease()
		c.leases[got.Nonce] = l
	}
	return l
}

// Recalls returns how many tickets were recalled.
func (c *Cluster) Recalls() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.recalls
}

// pushPrefill computes and presents; its blocks are held until the lease has ended, which may be long after the answer.
func (c *EngineCall) pushPrefill() error {
	e := c.Engine
	if c.lease = e.Cluster.use(&Worker{Worker: e.Worker, Cluster: e.Cluster}, "prefill", &c.kv); c.lease == nil {
		return c.refuse(500, "ticket")
	}
	l := c.lease
	if e.Fault != nil && e.Fault(c, StagePresent, 0) == Lose {
		c.w.Header().Set("Content-Type", "application/json")
		return c.write(c.whole(c.prompt))
	}
	e.Cluster.hold(blocksPerLease)
	e.wg.Go(func() {
		select {
		case <-l.settled:
		case <-l.ended:
		case <-e.quit:
		}
		e.Cluster.hold(-blocksPerLease)
	})
	l.mark("presented", l.presented)
	if err := c.fault(StagePrefill, 0); err != nil {
		l.end("prefill was aborted")
		return err
	}
	if c.ctx.Err() != nil {
		l.end("prefill was aborted")
		return errAbort
	}
	l.mark("computed", l.computed)
	if err := c.fault(StageAnswer, 0); err != nil {
		if err != errDone {
			l.end("prefill died")
		}
		return err
	}
	if err := c.json(c.whole(c.prompt)); err != nil {
		return err
	}
	return c.fault(StageAnswered, 0)
}

// pushDecode waits for the KV; when it will not come it computes it, as the connector does.
func (c *EngineCall) pushDecode() error {
	e := c.Engine
	if c.lease = e.Cluster.use(&Worker{Worker: e.Worker, Cluster: e.Cluster}, "decode", &c.kv); c.lease == nil {
		return c.refuse(500, "ticket")
	}
	l := c.lease
	if c.b.Stream { // vLLM's header goes at once
		c.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		if err := c.write(""); err != nil {
			return err
		}
	}
	if err := c.fault(StageLoad, 0); err != nil {
		l.end("decode let go")
		return err
	}
	e.Cluster.hold(blocksPerLease)
	defer e.Cluster.hold(-blocksPerLease)
	select {
	case <-l.computed:
		l.mark("settled", l.settled)
	case <-l.ended:
		select { // it takes its time to compute it all
		case <-time.After(100 * time.Millisecond):
		case <-c.ctx.Done():
			return errAbort
		}
	case <-c.ctx.Done():
		l.end("decode was aborted")
		return errAbort
	}
	if err := c.fault(StageLoaded, 0); err != nil {
		return err
	}
	return c.generate()
}
