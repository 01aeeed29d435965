package router

import (
	"bytes"
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

// leavers are clients each of which leaves when the engines have come to a stage of its request that is drawn beforehand: by
// events, so that a slow machine spreads them over the phases as a fast one does.
type leavers struct {
	seed uint64
	mu   sync.Mutex // guards what follows
	left map[int]*leaver
}

// roundsMax bounds how often as many requests more are sent as were not cancelled: most of each round are.
const roundsMax = 30

// leaver is one client.
type leaver struct {
	conn   net.Conn
	stages int // that are yet to come
}

// stagesMax is more than some of the requests have: a client of those stays to the end.
const stagesMax = 14

// stage is what an engine asks at each stage of a request.
func (l *leavers) stage(body []byte, id, stage string, n int) {
	i := bytes.Index(body, []byte("request-"))
	if i < 0 {
		return
	}
	var number int
	if _, err := fmt.Sscanf(string(body[i:min(len(body), i+20)]), "request-%d", &number); err != nil {
		return
	}
	l.mu.Lock()
	c := l.left[number]
	leaves := false
	if c != nil {
		leaves = c.stages == 0
		c.stages--
	}
	l.mu.Unlock()
	if leaves {
		_ = c.conn.Close()
	}
	h := fnv.New64a()
	fmt.Fprint(h, id, stage, number, n)
	<-time.After(time.Duration(rand.New(rand.NewPCG(l.seed, h.Sum64())).IntN(400)) * time.Microsecond) // it computes
}

// watch has the fleet's engines tell of their stages.
func (l *leavers) watch(ws []*routertest.Worker, es []*routertest.Engine) {
	for _, w := range ws {
		w.Fault = func(c *routertest.Call, stage string, n int) routertest.Action {
			l.stage(c.Body, w.ID, stage, n)
			return routertest.Go
		}
	}
	for _, e := range es {
		e.Lease = cancelLease
		e.Fault = func(c *routertest.EngineCall, stage string, n int) routertest.Action {
			l.stage(c.Body, e.ID, stage, n)
			return routertest.Go
		}
	}
}

// run sends the requests of these numbers by so many clients at once.
func (l *leavers) run(h *harness, from, to, clients int) {
	h.t.Helper()
	var running sync.WaitGroup
	for client := range clients {
		running.Go(func() {
			for i := from + client; i < to; i += clients {
				r := rand.New(rand.NewPCG(l.seed, uint64(i)))
				conn, err := net.Dial("tcp", h.addr)
				if err != nil {
					h.t.Error(err)
					return
				}
				l.mu.Lock()
				l.left[i] = &leaver{conn, r.IntN(stagesMax)}
				l.mu.Unlock()
				_ = conn.SetDeadline(time.Now().Add(patience))
				_, _ = io.WriteString(conn, post(ask{prompt: fmt.Sprintf("request-%d of these", i), n: 6, stream: r.IntN(2) == 0}.body(), "Connection: close"))
				_, _ = io.Copy(io.Discard, conn)
				_ = conn.Close()
			}
		})
	}
	running.Wait()
}

// TestCancelAnywhere has clients leave at random moments, in every dialect: what the engines held for them comes back, and
// neither a goroutine nor a connection stays. 10,000 requests are cancelled with HEADRACE_FULL, a tenth without.
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
			l := &leavers{seed: 7, left: map[int]*leaver{}}
			l.watch(ws, es)
			h := startMixed(t, func(c *Config) { c.NixlLease = cancelLease }, ws, es)
			sent, cancelled := 0, 0
			for round := 0; cancelled < each && round < roundsMax; round++ {
				more := each - cancelled
				l.run(h, sent, sent+more, 16)
				sent += more
				h.until("the router to be done with them", func() bool { return h.r.Status().Active == 0 })
				cancelled = 0
				for _, n := range h.cancelPhases() {
					cancelled += n
				}
			}
			h.quiet()
			h.until("the errands to be run", func() bool { return h.r.errands.Pending() == 0 })
			q := ask{n: 5}
			h.do(q).wantWhole(t, q)
			phases := h.cancelPhases()
			t.Logf("of %d requests %d were cancelled, in phases %v", sent, cancelled, phases)
			if cancelled < each || phases[statePrefilling.String()] == 0 || phases[stateDecoding.String()] == 0 {
				t.Errorf("of %d requests %d were cancelled, want %d, in phases %v: too little is shown", sent, cancelled, each, phases)
			}
		})
	}
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
