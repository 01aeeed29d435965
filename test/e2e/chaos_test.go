package e2e

import (
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// chaos is a run of accidents under load. Everything it draws comes from its seed; what the machine does with it does not.
type chaos struct {
	t        *testing.T
	c        *cluster
	requests []request
	wants    []*answer
	stop     chan struct{}

	right, failed, left, kills, stops atomic.Int64
}

// TestChaos: parts die and stop at random while clients come, go and hang up. Every answer is right or a clear error,
// and at the end all is as before. HEADRACE_CHAOS_SEED repeats a run's choices.
func TestChaos(t *testing.T) {
	needAll(t)
	lasts := 10 * time.Second
	if full {
		lasts = 2 * time.Minute
	}
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("HEADRACE_CHAOS_SEED"); v != "" {
		var err error
		if seed, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("HEADRACE_CHAOS_SEED=%d", seed)
	for name, o := range map[string]options{
		"1 node":                   {nodes: 1},
		"2 nodes":                  {nodes: 2},
		"2 nodes, 2 and 2 workers": {nodes: 2, args: []string{"--prefill", "2", "--decode", "2"}},
	} {
		t.Run(name, func(t *testing.T) {
			x := &chaos{t: t, c: start(t, o), stop: make(chan struct{})}
			x.run(seed+uint64(len(name)), lasts)
		})
	}
}

func (x *chaos) run(seed uint64, lasts time.Duration) {
	o := oracleFor(x.t, tinyModel(x.t))
	for i := range 40 {
		r := mixed(90_000, i*3)
		r.MaxTokens = 5 + i*7%400
		x.requests, x.wants = append(x.requests, r), append(x.wants, o.want(x.t, r))
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() { x.client(rand.New(rand.NewPCG(seed, uint64(i)))) })
	}
	wg.Go(func() { x.accidents(rand.New(rand.NewPCG(seed, 1<<32))) })
	timer := time.NewTimer(lasts)
	<-timer.C
	close(x.stop)
	wg.Wait()
	x.t.Logf("%d right answers, %d clear errors, %d clients hung up; %d kills, %d stops", x.right.Load(), x.failed.Load(), x.left.Load(), x.kills.Load(), x.stops.Load())
	if x.right.Load() == 0 || x.kills.Load()+x.stops.Load() == 0 {
		x.t.Error("nothing happened")
	}
	x.c.blocksBack(2*waitShort, "after chaos")
	x.c.split(2 * waitRestart)
	x.c.blocksBack(waitShort, "after the last answer")
}

func (x *chaos) over() bool {
	select {
	case <-x.stop:
		return true
	default:
		return false
	}
}

// client sends one request after the other and judges the answers.
func (x *chaos) client(rng *rand.Rand) {
	for !x.over() && !x.t.Failed() {
		i := rng.IntN(len(x.requests))
		st := post(x.c.url(), x.requests[i])
		if rng.IntN(8) == 0 {
			if n := rng.IntN(4); st.req.Stream && n > 0 {
				_ = st.until(n, waitHang)
			}
			st.hangUp()
			x.left.Add(1)
			continue
		}
		a, err := st.within(waitHang)
		if err == nil {
			err = a.equalsOrFails(x.wants[i])
		}
		switch {
		case err != nil:
			x.t.Errorf("request %d, %d tokens, %s: %v", i, len(x.requests[i].Prompt), brief(x.requests[i]), err)
		case a.Error != nil:
			x.failed.Add(1)
		default:
			x.right.Add(1)
		}
	}
}

// accidents kills or stops a worker or a daemon every now and then.
func (x *chaos) accidents(rng *rand.Rand) {
	tick := time.NewTimer(0)
	defer tick.Stop()
	var stopped sync.WaitGroup
	defer stopped.Wait()
	for {
		select {
		case <-x.stop:
			return
		case <-tick.C:
		}
		v := x.c.view()
		var pids []int
		for _, w := range v.Workers {
			pids = append(pids, w.PID)
		}
		for _, n := range v.Nodes {
			pids = append(pids, n.PID)
		}
		tick.Reset(time.Duration(200+rng.IntN(1500)) * time.Millisecond)
		if len(pids) == 0 {
			continue
		}
		pid := pids[rng.IntN(len(pids))]
		if rng.IntN(3) > 0 {
			if signal(pid, syscall.SIGKILL) == nil {
				x.kills.Add(1)
			}
			continue
		}
		if signal(pid, syscall.SIGSTOP) == nil {
			x.stops.Add(1)
			after := time.Duration(rng.IntN(4500)) * time.Millisecond
			stopped.Go(func() { x.goOn(pid, after) })
		}
	}
}

// goOn lets a stopped process continue after a while, or at once when the test ends.
func (x *chaos) goOn(pid int, after time.Duration) {
	timer := time.NewTimer(after)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-x.stop:
	}
	_ = signal(pid, syscall.SIGCONT) // it may have been killed meanwhile
}
