package routertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// members reads an object and holds that it has exactly the members that are named.
func members(b []byte, names ...string) (map[string]json.RawMessage, error) {
	var p map[string]json.RawMessage
	if err := json.Unmarshal(b, &p); err != nil {
		return nil, err
	}
	for _, name := range names {
		if _, ok := p[name]; !ok {
			return nil, fmt.Errorf("%s has no %s", b, name)
		}
	}
	if len(p) != len(names) {
		return nil, fmt.Errorf("%s has members beside %s", b, strings.Join(names, ", "))
	}
	return p, nil
}

// text is a member's string.
func text(p map[string]json.RawMessage, name string) string {
	var s string
	_ = json.Unmarshal(p[name], &s)
	return s
}

// direction reads which end the parameters are for, which the engine must be able to be: a producer that is asked to take KV
// cache ends, as does a consumer that is asked to send some.
func (c *EngineCall) direction() error {
	var p struct {
		Decode  bool `json:"do_remote_decode"`
		Prefill bool `json:"do_remote_prefill"`
	}
	if err := json.Unmarshal(c.Params, &p); err != nil {
		return err
	}
	switch {
	case p.Decode == p.Prefill:
		return fmt.Errorf("kv_transfer_params %s are for neither end", c.Params)
	case p.Decode && !c.Engine.Role.Prefills(), p.Prefill && !c.Engine.Role.Decodes():
		return fmt.Errorf("the engine is %s, and ends over %s", c.Engine.Role, c.Params)
	case p.Decode:
		c.Role = "prefill"
	default:
		c.Role = "decode"
	}
	return nil
}

// parseNixlPush knows both ends' parameters. Prefill's are NixlConnector's and a transfer id.
func (c *EngineCall) parseNixlPush() error {
	if len(c.Params) == 0 {
		return nil
	}
	if err := c.direction(); err != nil {
		return err
	}
	if c.Role == "prefill" {
		p, err := members(c.Params, "do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "transfer_id")
		if err != nil {
			return err
		}
		for _, name := range []string{"remote_engine_id", "remote_block_ids", "remote_host", "remote_port"} {
			if string(p[name]) != "null" {
				return fmt.Errorf("%s is %s for a prefill", name, p[name])
			}
		}
		return c.meetBy(text(p, "transfer_id"))
	}
	p, err := members(c.Params, "do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "remote_request_id", "transfer_id")
	if err != nil {
		return err
	}
	if text(p, "remote_request_id") != c.ID {
		return fmt.Errorf("remote_request_id %s for the request %s: prefill's blocks are found by it", p["remote_request_id"], c.ID)
	}
	at := text(p, "remote_host") + ":" + string(p["remote_port"])
	c.wantPeer(func(peer *Engine) string {
		if at != peer.KVAddr || text(p, "remote_engine_id") != peer.KVEngine || string(p["tp_size"]) != fmt.Sprint(max(peer.TensorParallel, 1)) || string(p["pp_size"]) != fmt.Sprint(max(peer.PipelineParallel, 1)) {
			return fmt.Sprintf("%s are not about %s", c.Params, peer.ID)
		}
		return ""
	})
	return c.meetBy(text(p, "transfer_id"))
}

// meetBy has the two ends meet by a transfer id.
func (c *EngineCall) meetBy(transfer string) error {
	if !strings.HasPrefix(transfer, "xfer-") || len(transfer) < len("xfer-")+32 {
		return fmt.Errorf("transfer id %q", transfer)
	}
	c.key = transfer
	return nil
}

// wantPeer has the other end checked when both have come.
func (c *EngineCall) wantPeer(check func(peer *Engine) string) { c.checkPeer = check }

// join is the coming of a call to the scheduler of an engine.
func (c *EngineCall) join() error {
	c.meet()
	o := c.meeting.other(c)
	if o == nil {
		return nil
	}
	for _, pair := range [2][2]*EngineCall{{c, o}, {o, c}} {
		if me, peer := pair[0], pair[1]; me.checkPeer != nil {
			if why := me.checkPeer(peer.Engine); why != "" {
				return errors.New(why)
			}
		}
	}
	if c.prompt != o.prompt {
		return errors.New("the two ends have different prompts")
	}
	if c.Engine.Dialect == "vllm-nixl-push" && c.ID != o.ID {
		return fmt.Errorf("ids %q and %q: vLLM finds the two ends by their id", c.ID, o.ID)
	}
	return nil
}
