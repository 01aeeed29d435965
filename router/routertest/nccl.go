package routertest

import (
	"errors"
	"fmt"
	"regexp"
)

// peers is the only form of a request's id that the connector can read.
var peers = regexp.MustCompile(`^___prefill_addr_([^_]+:\d+)___decode_addr_([^_]+:\d+)_([0-9a-f]{32})$`)

// parseNCCL reads who sends to whom. There is nothing in the body.
func (c *EngineCall) parseNCCL() error {
	m := peers.FindStringSubmatch(c.ID)
	switch {
	case len(c.Params) > 0:
		return errors.New("transfer parameters for P2P-NCCL")
	case m == nil:
		return fmt.Errorf("the engine ends over the request id %q", c.ID)
	case m[1] == c.Engine.KVAddr && c.Engine.Role.Prefills():
		c.Role = "prefill"
	case m[2] == c.Engine.KVAddr && c.Engine.Role.Decodes():
		c.Role = "decode"
	default:
		return fmt.Errorf("request id %q at %s, which is %s", c.ID, c.Engine.KVAddr, c.Engine.Role)
	}
	c.key = c.ID
	return nil
}

// ncclPrefill sends what it computes to decode, where it stays until decode has served the request: blocks of the meeting
// that nobody but decode frees, whatever becomes of prefill.
func (c *EngineCall) ncclPrefill() error {
	m := c.meeting
	if m.other(c) != nil {
		return c.violated("decode was asked first: it waits in its step for what prefill will send")
	}
	m.keep(c.Engine, forGood, nil)
	if err := c.fault(StagePrefill, 0); err != nil {
		if !errors.Is(err, errDone) && c.ctx.Err() != nil && !c.Engine.killed() {
			c.Engine.Cluster.violate("engine %s: a prefill is aborted that has sent layers, which decode keeps", c.Engine.ID)
		}
		m.mark(m.dropped) // as far as this fake is concerned
		return err
	}
	if c.ctx.Err() != nil && !c.Engine.killed() {
		c.Engine.Cluster.violate("engine %s: a prefill is aborted that has sent layers, which decode keeps", c.Engine.ID)
		m.mark(m.dropped)
		return errAbort
	}
	return c.computed()
}

// violated ends a call that is against the protocol.
func (c *EngineCall) violated(why string) error {
	c.Engine.Cluster.violate("engine %s: %s", c.Engine.ID, why)
	return errAbort
}

// ncclDecode takes what lies there. A request of which nothing does waits, and no other one gets on meanwhile.
func (c *EngineCall) ncclDecode() error {
	m := c.meeting
	select {
	case <-m.computed:
	default:
		return c.violated("decode is asked before prefill has ended")
	}
	return c.takeItself()
}
