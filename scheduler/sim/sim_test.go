package sim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/trace"
)

const goalTTFT, goalITL = 2 * time.Second, 50 * time.Millisecond

func table(t testing.TB, name string) *Table {
	t.Helper()
	tab, err := TableNamed(name)
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

// talks makes up requests, some of whose prompts begin alike.
func talks(n int, perSecond float64, seed uint64) []trace.Request {
	rng := rand.New(rand.NewPCG(seed, 1))
	at := 0.0
	var all []trace.Request
	for i := range n {
		at += rng.ExpFloat64() / perSecond
		q := trace.Request{At: time.Duration(at * 1e9), Prompt: 1 + int(rng.ExpFloat64()*1500), Output: 1 + int(rng.ExpFloat64()*150)}
		for k := range (q.Prompt + trace.BlockTokens - 1) / trace.BlockTokens {
			id := uint64(i*1000 + k)
			if k < 2 && i%2 == 0 {
				id = uint64(k)
			}
			q.Blocks = append(q.Blocks, id)
		}
		all = append(all, q)
	}
	return all
}

// restless wants other pools each time: what it is asked for says nothing.
type restless struct {
	rng  *rand.Rand
	most int
	seen func(*planner.Observation)
}

func (r *restless) Name() string { return "restless" }
func (r *restless) Step(o *planner.Observation) planner.Decision {
	if r.seen != nil {
		r.seen(o)
	}
	n := func() int { return r.rng.IntN(r.most) }
	return planner.Decision{Want: planner.Pools{Prefill: n(), Decode: n(), Whole: n()}, Reason: "restless"}
}
func (r *restless) State() ([]byte, error) { return nil, nil }
func (r *restless) Restore([]byte) error   { return nil }

// TestAlone holds a request that nobody disturbs against its computing by hand.
func TestAlone(t *testing.T) {
	tab := *table(t, "large")
	tab.Jitter = 0
	p, _ := planner.New("static:prefill=1:decode=1", planner.Config{})
	one := []trace.Request{{Prompt: 1000, Output: 101}}
	r, err := Run(&trace.Slice{Requests: one}, p, Options{Table: &tab, Limits: planner.Limits{MaxGPUs: 2}, TTFT: goalTTFT, ITL: goalITL})
	if err != nil {
		t.Fatal(err)
	}
	e := tab.Prefill
	ttft := (e.StepUs + 1000*e.PromptTokenUs + e.PromptAttention*1e-6*1000*500) / 1e3
	moved := tab.ChannelUs/1e3 + 1001*tab.TokenBytes/tab.ChannelBps*(1-tab.Overlap)*1e3
	steps := 0.0
	for k := range 100 {
		steps += tab.Decode.wallUs(0, 0, 1, int64(1001+k)) / 1e3
	}
	if math.Abs(r.TTFT.P50-ttft) > 1e-3 || math.Abs(r.ITL.P50-(moved+steps)/100) > 1e-3 {
		t.Errorf("TTFT %v and ITL %v ms, want %v and %v", r.TTFT.P50, r.ITL.P50, ttft, (moved+steps)/100)
	}
	if r.Good != 1 || r.Done != 1 {
		t.Errorf("got %+v", r)
	}
}

// TestNothingIsLost changes pools all the time, and looks that every request ends once and that the budget holds.
func TestNothingIsLost(t *testing.T) {
	for seed := range uint64(6) {
		for _, undivided := range []bool{false, true} {
			all := talks(800, 6, seed)
			all = append(all, trace.Request{At: all[799].At, Prompt: 1 << 20, Output: 5}) // nobody has room for it
			p := &restless{rng: rand.New(rand.NewPCG(seed, 2)), most: 9}
			tab := *table(t, "large")
			tab.Prefill.StartMs, tab.Decode.StartMs, tab.Whole.StartMs = 700, 900, 800
			limits := planner.Limits{MaxGPUs: 10, Undivided: undivided}
			worst := 0
			p.seen = func(o *planner.Observation) {
				taken := o.Now().Times(tab.EngineGPUs()) + o.Prefill.Draining + o.Decode.Draining + o.Whole.Draining
				worst = max(worst, taken)
			}
			r, err := Run(&trace.Slice{Requests: all}, p, Options{Table: &tab, Limits: limits, TTFT: goalTTFT, ITL: goalITL, Seed: seed, StayDrained: seed%3 == 0})
			if err != nil {
				t.Fatal(err)
			}
			if r.Requests != 801 || r.Done != 800 || r.Refused != 1 || r.Unfinished != 0 {
				t.Errorf("seed %d, undivided %v: %d came, %d were answered, %d refused, %d not finished", seed, undivided, r.Requests, r.Done, r.Refused, r.Unfinished)
			}
			if r.GPUsMost > 10 || worst > 10 || r.Acts < 10 {
				t.Errorf("seed %d, undivided %v: %d GPUs of 10, %d seen, %d changes", seed, undivided, r.GPUsMost, worst, r.Acts)
			}
		}
	}
}

// TestKVHolds looks into the engines all along: what they count is what their requests hold, and never more than they have.
func TestKVHolds(t *testing.T) {
	tab := *table(t, "large")
	tab.Prefill.StartMs, tab.Decode.StartMs = 500, 500
	tab.Decode.KVTokens, tab.Prefill.KVTokens = 20000, 20000 // so that requests wait for room
	p := &restless{rng: rand.New(rand.NewPCG(5, 2)), most: 7}
	o := Options{Table: &tab, Limits: planner.Limits{MaxGPUs: 8}, TTFT: goalTTFT, ITL: goalITL}
	var s *sim
	p.seen = func(*planner.Observation) {
		for i, e := range s.engines {
			live := int64(0)
			for _, st := range e.running {
				q := &s.reqs[st.who]
				live += int64(q.Prompt+q.Output) - (st.end - e.steps)
			}
			if e.busy || e.state == gone { // within a step, what it makes is not counted yet
				continue
			}
			if e.kv > e.t.KVTokens || e.kv < 0 || e.live != live || e.coming < 0 || e.owed < 0 || e.queued < 0 {
				t.Fatalf("engine %d: %d of %d tokens taken, %d live for %d, %d coming, %d owed, %d ns queued", i, e.kv, e.t.KVTokens, e.live, live, e.coming, e.owed, e.queued)
			}
		}
	}
	s = newSim(&trace.Slice{Requests: talks(600, 5, 9)}, p, o)
	if err := s.begun(); err != nil {
		t.Fatal(err)
	}
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	for i, e := range s.engines {
		if e.state != gone && (e.kv != 0 || e.live != 0 || e.coming != 0 || e.owed != 0 || e.queued != 0 || !e.empty()) {
			t.Errorf("engine %d in the end: %+v", i, e)
		}
	}
	if len(s.free) != len(s.reqs) {
		t.Errorf("%d of %d requests were let go", len(s.free), len(s.reqs))
	}
}

// TestSameSeedSameBytes runs everything twice.
func TestSameSeedSameBytes(t *testing.T) {
	run := func(seed uint64) string {
		var log bytes.Buffer
		p := &restless{rng: rand.New(rand.NewPCG(1, 2)), most: 6}
		o := Options{Table: table(t, "small"), Limits: planner.Limits{MaxGPUs: 10}, TTFT: goalTTFT, ITL: goalITL, Seed: seed,
			OnAct: func(a planner.Act) { fmt.Fprintf(&log, "%+v\n", a) }}
		r, err := Run(&trace.Slice{Requests: talks(500, 10, 3)}, p, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.NewEncoder(&log).Encode(r); err != nil {
			t.Fatal(err)
		}
		return log.String()
	}
	one := run(7)
	if two := run(7); one != two {
		t.Errorf("two runs differ:\n%s\n%s", one, two)
	}
	if other := run(8); one == other {
		t.Error("another seed changes nothing")
	}
}

// TestWindow counts what comes within it alone.
func TestWindow(t *testing.T) {
	all := talks(400, 4, 1)
	run := func(from, to time.Duration) *Report {
		p, _ := planner.New("static:prefill=3:decode=3", planner.Config{})
		r, err := Run(&trace.Slice{Requests: all}, p, Options{Table: table(t, "large"), Limits: planner.Limits{MaxGPUs: 9}, First: planner.Pools{Prefill: 3, Decode: 3}, TTFT: goalTTFT, ITL: goalITL, From: from, To: to})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	const middle = 40 * time.Second
	a, b, whole := run(0, middle), run(middle, 0), run(0, 0)
	if a.Requests+b.Requests != 400 || whole.Requests != 400 || a.Good+b.Good != whole.Good || a.Requests == 0 || b.Requests == 0 {
		t.Errorf("%d and %d requests of %d, %d and %d good of %d", a.Requests, b.Requests, whole.Requests, a.Good, b.Good, whole.Good)
	}
	if math.Abs(whole.GPUsMean-6) > 1e-9 || math.Abs(a.GPUsMean-6) > 1e-9 {
		t.Errorf("%v and %v GPUs, want 6", whole.GPUsMean, a.GPUsMean)
	}
}

func TestEventsInOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var h events
	var last event
	for range 3000 {
		if len(h.heap) == 0 || rng.IntN(5) > 1 {
			h.push(max(last.at, 0)+int64(rng.IntN(50)), stepEnds, 0)
			continue
		}
		e := h.pop()
		if !before(&last, &e) && last.made != 0 {
			t.Fatalf("%+v after %+v", e, last)
		}
		last = e
	}
}

func TestStreamsInOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var h streams
	var want []int64
	for i := range 500 {
		end := int64(rng.IntN(100))
		h.push(stream{end: end, who: int32(i)})
		want = append(want, end)
	}
	slices.Sort(want)
	for _, end := range want {
		if got := h.pop(); got.end != end {
			t.Fatalf("got %d, want %d", got.end, end)
		}
	}
}

// TestCache holds the cache against a plain list.
func TestCache(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	c := newCache()
	var list []uint64 // the newest last
	for range 2000 {
		n := 1 + rng.IntN(6)
		blocks := make([]uint64, n)
		start := uint64(rng.IntN(40))
		for i := range blocks {
			blocks[i] = start + uint64(i)
		}
		limit := 10 + rng.IntN(20)
		c.use(blocks, limit)
		for i := len(blocks) - 1; i >= 0; i-- {
			list = append(slices.DeleteFunc(list, func(id uint64) bool { return id == blocks[i] }), blocks[i])
		}
		list = list[max(0, len(list)-limit):]
		if len(c.at) != len(list) {
			t.Fatalf("%d blocks, want %d", len(c.at), len(list))
		}
		for id := range uint64(50) {
			if has := c.has([]uint64{id}) == 1; has != slices.Contains(list, id) {
				t.Fatalf("block %d: %v, want %v", id, has, !has)
			}
		}
	}
}

func TestTables(t *testing.T) {
	for _, name := range Tables() {
		if tab := table(t, name); tab.Name != name || tab.Note == "" {
			t.Errorf("%s is called %q, with note %q", name, tab.Name, tab.Note)
		}
	}
	for _, bad := range []string{"", "{}", `{"nam": 1}`, `{"name":"x","channel_bytes_per_s":1}`} {
		if _, err := ParseTable([]byte(bad)); err == nil {
			t.Errorf("%q is no table", bad)
		}
	}
	if _, err := TableNamed("none"); err == nil {
		t.Error("there is no table none")
	}
}

// BenchmarkReplay is a run over an hour of made-up requests.
func BenchmarkReplay(b *testing.B) {
	all, tab := talks(20000, 5.5, 1), table(b, "large")
	b.ReportAllocs()
	for b.Loop() {
		p, _ := planner.New("static:prefill=4:decode=5", planner.Config{})
		if _, err := Run(&trace.Slice{Requests: all}, p, Options{Table: tab, Limits: planner.Limits{MaxGPUs: 9}, First: planner.Pools{Prefill: 4, Decode: 5}, TTFT: goalTTFT, ITL: goalITL}); err != nil {
			b.Fatal(err)
		}
	}
}
