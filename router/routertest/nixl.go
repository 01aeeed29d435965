package routertest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// nixlAnswer is what prefill answered, for one decode.
type nixlAnswer struct {
	prompt string
	params string
	of     *Engine
	mu     sync.Mutex // guards what follows
	used   bool
	over   bool // prefill has let go of the blocks
	timer  *time.Timer
}

// free lets go of prefill's blocks; false when that had happened already.
func (a *nixlAnswer) free(c *Cluster) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over {
		return false
	}
	a.over = true
	a.timer.Stop()
	c.hold(-blocksPerLease)
	return true
}

// died is the end of the engine: what it kept is gone with it.
func (e *Engine) died() {
	e.Cluster.free(func(a *nixlAnswer) bool { return a.of == e })
}

// free lets go of the blocks that prefill keeps for some answers.
func (c *Cluster) free(which func(*nixlAnswer) bool) {
	c.mu.Lock()
	var all []*nixlAnswer
	for _, a := range c.answers {
		if which(a) {
			all = append(all, a)
		}
	}
	c.mu.Unlock()
	for _, a := range all {
		a.free(c)
	}
}

// EndLeases ends NIXL's leases as if their time was over: what prefill keeps for decode that has not come, it lets go.
func (c *Cluster) EndLeases() {
	c.free(func(*nixlAnswer) bool { return true })
}

// parseNixl knows prefill's parameters, and decode's as those that a prefill answered with, to the byte.
func (c *EngineCall) parseNixl() error {
	if len(c.Params) == 0 {
		return nil
	}
	var p map[string]json.RawMessage
	if err := json.Unmarshal(c.Params, &p); err != nil {
		return err
	}
	if string(p["do_remote_decode"]) == "true" {
		c.Role = "prefill"
		for name, v := range p {
			if name != "do_remote_decode" && string(v) != "false" && string(v) != "null" {
				return fmt.Errorf("%s is %s for a prefill", name, v)
			}
		}
		return nil
	}
	c.Role = "decode"
	cl := c.Engine.Cluster
	cl.mu.Lock()
	defer cl.mu.Unlock()
	a := cl.answers[string(c.Params)]
	if a == nil {
		return errors.New("no prefill answered with these parameters")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.used {
		return errors.New("a prefill's answer is used a second time")
	}
	a.used = true
	if a.prompt != c.prompt {
		return errors.New("another prompt than prefill's")
	}
	c.answer = a
	return nil
}

func (c *EngineCall) nixlPrefill() error {
	e := c.Engine
	e.Cluster.hold(blocksPerLease)
	if err := c.fault(StagePrefill, 0); err != nil {
		e.Cluster.hold(-blocksPerLease)
		return err
	}
	if c.ctx.Err() != nil { // its scheduler aborts it
		e.Cluster.hold(-blocksPerLease)
		return errAbort
	}
	a := &nixlAnswer{prompt: c.prompt, of: e}
	a.params = fmt.Sprintf(`{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 9007199254740993]], "remote_engine_id": "%s", "remote_request_id": "cmpl-%s-%d",
 "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "remote_num_tokens": 200, "remote_blocks_expiry_time": %s, "transfer_mode": "pull", "new": {"a": [1e400]}}`,
		e.ID, c.ID, c.N, strings.TrimSpace(e.Expiry))
	e.Cluster.mu.Lock()
	if e.Cluster.answers == nil {
		e.Cluster.answers = map[string]*nixlAnswer{}
	}
	e.Cluster.answers[a.params] = a
	e.Cluster.mu.Unlock()
	a.mu.Lock()
	a.timer = time.AfterFunc(e.Lease, func() { a.free(e.Cluster) })
	a.mu.Unlock()
	if err := c.fault(StageAnswer, 0); err != nil {
		if err != errDone {
			a.free(e.Cluster) // aborted, or dead
		}
		return err
	}
	answer := bytes.Replace([]byte(c.whole(c.prompt)), []byte(`"kv_transfer_params":null`), []byte(`"kv_transfer_params":`+a.params), 1)
	if err := c.json(string(answer)); err != nil {
		a.free(e.Cluster)
		return err
	}
	return c.fault(StageAnswered, 0)
}

// nixlDecode reads prefill's blocks, whatever is in them by now.
func (c *EngineCall) nixlDecode() error {
	e := c.Engine
	if c.b.Stream {
		c.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		if err := c.write(""); err != nil {
			return err
		}
	}
	if err := c.fault(StageLoad, 0); err != nil {
		c.answer.free(e.Cluster) // its scheduler says so to prefill
		return err
	}
	e.Cluster.hold(blocksPerLease)
	defer e.Cluster.hold(-blocksPerLease)
	if !c.answer.free(e.Cluster) && !c.answer.of.killed() { // from the dead nothing can be read, and it computes the prompt itself
		c.wrong = true
	}
	if err := c.fault(StageLoaded, 0); err != nil {
		return err
	}
	return c.generate()
}
