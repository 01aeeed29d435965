package router

import (
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/router/routertest"
)

// cancelsAll is how many requests TestCancelAnywhere cancels when it is run at full length, over all dialects.
const cancelsAll = 10000

// cancelLease is for how long a vLLM keeps what nobody fetches: longer than the router lets a decode linger.
const cancelLease = 3 * time.Second

// cancelFleets are two pairs, or four workers, of each dialect.
var cancelFleets = map[string]func() ([]*routertest.Worker, []*routertest.Engine){
	"native": func() ([]*routertest.Worker, []*routertest.Engine) { return pair("p1", "p2", "d1", "d2"), nil },
}

func init() {
	for _, dialect := range []string{"openai", "vllm", "vllm-nixl", "vllm-nixl-push", "vllm-mooncake", "vllm-p2p-nccl", "sglang"} {
		cancelFleets[dialect] = func() ([]*routertest.Worker, []*routertest.Engine) {
			return nil, ranked(engines(dialect, "p1", "p2", "d1", "d2"), 2)
		}
	}
}

// slowly makes a fleet take some time over each stage, by a seed: the same requests take the same time again.
func slowly(ws []*routertest.Worker, es []*routertest.Engine, seed uint64) {
	wait := func(id, stage string, call, n int) {
		h := fnv.New64a()
		fmt.Fprint(h, id, stage, call, n)
		<-time.After(time.Duration(rand.New(rand.NewPCG(seed, h.Sum64())).IntN(400)) * time.Microsecond) // it computes
	}
	for _, w := range ws {
		w.Fault = func(c *routertest.Call, stage string, n int) routertest.Action {
			wait(w.ID, stage, c.N, n)
			return routertest.Go
		}
	}
	for _, e := range es {
		e.Lease = cancelLease
		e.Fault = func(c *routertest.EngineCall, stage string, n int) routertest.Action {
			wait(e.ID, stage, c.N, n)
			return routertest.Go
		}
	}
}

// TestCancelAnywhere has clients leave at random moments, in every dialect: what the engines held for them comes back, and
// neither a goroutine nor a connection stays. 10,000 requests with HEADRACE_FULL, a tenth without.
func TestCancelAnywhere(t *testing.T) {
	total := cancelsAll / 10
	switch {
	case os.Getenv("HEADRACE_FULL") != "":
		total = cancelsAll
	case testing.Short():
		total = cancelsAll / 50
	}
	each := (total + len(cancelFleets) - 1) / len(cancelFleets)
	for dialect, fleet := range cancelFleets {
		t.Run(dialect, func(t *testing.T) {
			leakCheck(t)
			ws, es := fleet()
			slowly(ws, es, 1)
			h := startMixed(t, func(c *Config) { c.NixlLease = cancelLease }, ws, es)
			cancelled := h.leave(each, 16)
			h.until("the errands to be run", func() bool { return h.r.errands.Pending() == 0 })
			q := ask{n: 5}
			h.do(q).wantWhole(t, q)
			t.Logf("%d requests, %d of them cancelled in phases %v", each, cancelled, h.cancelPhases())
			if cancelled == 0 {
				t.Error("nothing was cancelled, so that nothing is shown")
			}
		})
	}
}

// leave sends n requests by so many clients at once, each of which leaves after a while of its own. It returns how many the
// router noted as cancelled.
func (h *harness) leave(n, clients int) int {
	h.t.Helper()
	var running sync.WaitGroup
	for client := range clients {
		running.Go(func() {
			r := rand.New(rand.NewPCG(7, uint64(client)))
			for i := client; i < n; i += clients {
				c, err := net.Dial("tcp", h.addr)
				if err != nil {
					h.t.Error(err)
					return
				}
				_, _ = io.WriteString(c, post(ask{n: 12, stream: r.IntN(2) == 0}.body()))
				_ = c.SetReadDeadline(time.Now().Add(time.Duration(r.IntN(5000)) * time.Microsecond))
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			}
		})
	}
	running.Wait()
	h.quiet()
	cancelled := 0
	for _, n := range h.cancelPhases() {
		cancelled += n
	}
	return cancelled
}

// cancelPhases is how many requests were cancelled in each phase.
func (h *harness) cancelPhases() map[string]int {
	phases := map[string]int{}
	for i := state(0); i < stateDone; i++ {
		for _, cause := range []string{"client_gone", "client_slow"} {
			if n := int(value(h.r.metrics.cancels.WithLabelValues(i.String(), cause))); n > 0 {
				phases[i.String()] += n
			}
		}
	}
	return phases
}
