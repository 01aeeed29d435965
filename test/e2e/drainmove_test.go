package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

// counter reads a counter of the first router's, by its name with its labels.
func (c *cluster) counter(name string) (float64, error) {
	resp, err := soakAdmin.Get("http://" + c.view().Routers[0].Admin + "/metrics")
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, errors.New("the router has no " + name)
}

// drainAside runs headrace drain.
func (c *cluster) drainAside(id string) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin(c.t), "drain", id, "--data-dir", c.data, "--timeout", "90s")
	cmd.Env = c.environ()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("headrace drain %s: %w: %s", id, err, out)
	}
	return nil
}

// TestDrainMovesStreams drains a decode worker under streams: they go on at the other one with their KV cache, which computes no prompt,
// every answer is that of a worker that was left alone, and no block is held in the end.
func TestDrainMovesStreams(t *testing.T) {
	c := start(t, options{nodes: 2, args: []string{"--decode", "2"}})
	o := oracleFor(t, tinyModel(t))
	var decodes []worker
	eventually(t, waitShort, "there are two decode workers", func() error {
		decodes = nil
		for _, w := range c.view().Workers {
			if w.Role == registry.RoleDecode {
				decodes = append(decodes, worker{w})
			}
		}
		if len(decodes) != 2 {
			return fmt.Errorf("%d", len(decodes))
		}
		return nil
	})
	const streams = 6
	moved, waits := 0., 0
	for round := 0; moved == 0; round++ { // a machine that does other things may be slower to drain than to answer
		if round == 5 {
			t.Fatal("in five rounds no stream was moved")
		}
		var asked []request
		var running []*stream
		for i := range streams {
			r := sampled(request{Prompt: seededPrompt(uint64(9000+100*round+i), 40+37*i), MaxTokens: 2000, Stream: true}, i)
			asked, running = append(asked, r), append(running, post(c.url(), r))
		}
		for _, st := range running {
			if err := st.until(10, waitHang); err != nil {
				t.Fatal(err)
			}
		}
		from, to := decodes[round%2], decodes[1-round%2]
		if err := c.drainAside(from.ID); err != nil {
			t.Fatal(err)
		}
		for _, st := range running {
			if !st.ended() {
				waits++
			}
		}
		for i, st := range running {
			mustEqual(t, st.wait(), o.want(t, asked[i]), fmt.Sprintf("round %d, stream %d", round, i))
		}
		c.blocksBack(waitHang, "after the streams have moved")
		var err error
		if moved, err = c.counter(`headrace_router_moves_total{result="moved"}`); err != nil {
			t.Fatal(err)
		}
		st, err := to.status()
		if err != nil {
			t.Fatal(err)
		}
		if st.Counters.PromptTokens != 0 {
			t.Errorf("%s has computed %d tokens of prompts", to.ID, st.Counters.PromptTokens)
		}
		if err := c.reg.Undrain(t.Context(), from.ID); err != nil {
			t.Fatal(err)
		}
	}
	for _, reason := range []string{"decode_lost", "decode_failed", "prefill_lost"} {
		if n, err := c.counter(`headrace_router_redispatches_total{reason="` + reason + `"}`); err == nil && n > 0 {
			t.Errorf("%g requests were dispatched again: %s", n, reason)
		}
	}
	t.Logf("%g streams have moved; %d went on when the drain was over", moved, waits)
}
