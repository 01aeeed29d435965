package pairing

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// randomView is a fleet of any kind, some of it broken.
func randomView(rng *rand.Rand) *View {
	v := &View{Now: now}
	roles := []Role{RolePrefill, RoleDecode, RoleBoth}
	chance := func(p float64) bool { return rng.Float64() < p }
	for i := range 1 + rng.IntN(10) {
		c := worker(fmt.Sprintf("w%d", i), roles[rng.IntN(3)])
		c.Blocks = 1000
		c.Load = Load{PrefillTokens: int64(rng.IntN(100000)), Prefills: int64(rng.IntN(5)), Decodes: int64(rng.IntN(50)), HeldTokens: int64(rng.IntN(20000)), HeadFor: time.Duration(rng.IntN(int(time.Second)))}
		if chance(0.5) {
			c.Engine = Engine{Known: true, Running: 3, Waiting: int64(rng.IntN(20)), Foreign: int64(rng.IntN(4)), KVUsage: rng.Float64() * 1.05}
		}
		if chance(0.5) {
			c.Speeds = Speeds{PrefillRate: 1000 + 50000*rng.Float64(), ITL: 0.02 * rng.Float64(), ITLStream: 0.001 * rng.Float64()}
		}
		c.CachedTokens = int64(rng.IntN(9000))
		for _, f := range []struct {
			p  float64
			do func()
		}{
			{0.1, func() { c.Model = "x" }}, {0.1, func() { c.Model, c.LoRAs = "base", []string{"y", "m"} }}, {0.1, func() { c.NodeData = "" }},
			{0.1, func() { c.NodeID = "" }}, {0.2, func() { c.Fingerprint = "g" }}, {0.2, func() { c.Opaque = true }}, {0.2, func() { c.BlockTokens = 32 }},
			{0.1, func() { c.Dialect, c.NodeID, c.NodeData = DialectPlain, "", "" }}, {0.1, func() { c.Dialect = "vllm" }}, {0.1, func() { c.Dialect = DialectNixl }},
			{0.1, func() { c.CoolUntil, c.CoolReason = now.Add(time.Second), "lost" }}, {0.1, func() { c.Weight = new(float64) }},
			{0.1, func() { x := rng.Float64(); c.Weight = &x }}, {0.1, func() { c.NodeID = "n" }},
		} {
			if chance(f.p) {
				f.do()
			}
		}
		v.Workers = append(v.Workers, c)
	}
	barred := fmt.Sprintf("w%d>w%d", rng.IntN(5), rng.IntN(5))
	v.PairBarred = func(p, d string) bool { return p+">"+d == barred }
	if chance(0.7) {
		way := Channel{SpeedBps: 1e9 * rng.Float64(), BacklogBytes: 1e8 * rng.Float64(), RTT: time.Duration(rng.IntN(1e7)), AgainShare: 0.1 * rng.Float64(), TokenBytes: 1e5 * rng.Float64()}
		v.Channel = func(p, d *Worker) (Channel, bool) {
			c := way
			c.SpeedBps *= draw(1, p.ID, d.ID)
			return c, draw(2, p.ID, d.ID) < 0.8
		}
	}
	return v
}

func randomRequest(rng *rand.Rand) Request {
	r := Request{ID: fmt.Sprint(rng.Uint64()), Model: "m", PromptTokens: 1 + int64(rng.IntN(10000)), Attempt: 1, Whole: rng.IntN(8) == 0}
	if rng.IntN(4) == 0 {
		r.Exclude = []string{fmt.Sprintf("w%d", rng.IntN(5))}
	}
	if rng.IntN(4) == 0 {
		r.Warm = []string{fmt.Sprintf("w%d", rng.IntN(5))}
	}
	if rng.IntN(6) == 0 {
		r.Session = []string{fmt.Sprintf("w%d", rng.IntN(5))}
	}
	return r
}

func byID(v *View, w *Worker) *Candidate {
	for i := range v.Workers {
		if w != nil && v.Workers[i].ID == w.ID {
			return &v.Workers[i]
		}
	}
	return nil
}

// checkFit looks at a decision with rules of its own, not with the filters'.
func checkFit(t *testing.T, r *Request, v *View, d Decision) {
	t.Helper()
	if (d.Whole == nil) == (d.Decode == nil) || (d.Decode == nil) != (d.Prefill == nil) || r.Whole && d.Whole == nil {
		t.Fatalf("neither one worker nor two: %+v", d)
	}
	coolers := 0
	for i := range v.Workers {
		c := &v.Workers[i]
		if c.Serves(r.Model) && c.weight() > 0 && !c.CoolUntil.After(now) && (len(r.Exclude) == 0 || r.Exclude[0] != c.ID) {
			coolers++
		}
	}
	for _, w := range []*Worker{d.Prefill, d.Decode, d.Whole} {
		c := byID(v, w)
		if c == nil {
			continue
		}
		if c.Model != r.Model && !(len(c.LoRAs) > 0 && c.LoRAs[1] == r.Model) || c.Weight != nil && *c.Weight == 0 || len(r.Exclude) > 0 && r.Exclude[0] == c.ID || c.CoolUntil.After(now) && coolers > 0 {
			t.Fatalf("picked %+v for %+v: %s", c.Worker, r, d.Reason)
		}
	}
	if p, c := d.Prefill, d.Decode; p != nil {
		daemons := p.Dialect != DialectNixl
		if p.ID == c.ID || p.Dialect != c.Dialect || p.Dialect == DialectPlain || p.Fingerprint != c.Fingerprint || p.Opaque != c.Opaque || p.Opaque && p.BlockTokens != c.BlockTokens ||
			p.Role == RoleDecode || c.Role == RolePrefill || daemons && (p.NodeID == "" || c.NodeID == "" || c.NodeData == "") || v.PairBarred(p.ID, c.ID) {
			t.Fatalf("unfit pair %+v > %+v", p, c)
		}
	}
}

func TestNobodyPicksWhatDoesNotFit(t *testing.T) {
	for _, name := range Names {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(7, 7))
			policy, err := New(name, 1)
			if err != nil {
				t.Fatal(err)
			}
			pairs, wholes := 0, 0
			for range 3000 {
				v, r := randomView(rng), randomRequest(rng)
				d, err := policy.Pick(context.Background(), r, v)
				if err != nil {
					var none *ErrNone
					if !errors.As(err, &none) {
						t.Fatal(err)
					}
					continue
				}
				if d.Reason == "" {
					t.Fatal("no reason")
				}
				checkFit(t, &r, v, d)
				if d.Whole != nil {
					wholes++
				} else {
					pairs++
				}
			}
			if pairs < 50 || wholes < 50 {
				t.Errorf("%d pairs and %d single workers: one of them was hardly tried", pairs, wholes)
			}
		})
	}
}

// Whatever the policy leaves out on its way, no choice that it might have made is cheaper.
func TestJointIsNeverWorseThanAnotherChoice(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 8))
	for range 5000 {
		v, r := randomView(rng), randomRequest(rng)
		d, err := (&Joint{}).Pick(context.Background(), r, v)
		if err != nil {
			continue
		}
		f := filter(&r, v)
		others := learned(v)
		best := math.Inf(1)
		decodes := false
		for _, c := range f.left {
			decodes = decodes || c.Role.Decodes()
		}
		for _, p := range f.left {
			ps := newSide(&r, p, &others)
			if c := ps.whole(); p.Role.Decodes() || !decodes {
				best = min(best, c.Total())
			}
			for _, c := range f.left {
				cs := newSide(&r, c, &others)
				if !r.Whole && p.sends() && c.takes() && p.ID != c.ID && misfit(p.Worker, c.Worker) == "" && !v.PairBarred(p.ID, c.ID) {
					cost := ps.pair(&r, v, &cs)
					best = min(best, cost.Total())
				}
			}
		}
		got := d.Options[0]
		if !got.Chosen || got.Sum > best*(1+tieShare)+tieSeconds || got.Sum < best {
			t.Fatalf("picked for %v s, the best is %v s: %s", got.Sum, best, d.Reason)
		}
		if d.Whole != nil && got.Whole != d.Whole.ID || d.Whole == nil && (got.Prefill != d.Prefill.ID || got.Decode != d.Decode.ID) {
			t.Fatalf("shows another choice than it made: %+v", d)
		}
		if len(d.Options) > optionsKept || d.Weighed < len(d.Options) {
			t.Fatalf("%d options of %d", len(d.Options), d.Weighed)
		}
		again, err := (&Joint{}).Pick(context.Background(), r, v)
		if err != nil || !reflect.DeepEqual(d, again) {
			t.Fatalf("the same question has two answers: %+v, %+v (%v)", d, again, err)
		}
	}
}

// streams make a worker decode so much that a prefill is better done elsewhere.
func streams(c *Candidate) { c.Load.Decodes = 20 }

func TestTiesAreSpread(t *testing.T) {
	for _, name := range Names {
		t.Run(name, func(t *testing.T) {
			v := &View{Now: now, Workers: []Candidate{worker("p1", RolePrefill), worker("p2", RolePrefill), with(worker("d1", RoleDecode), streams), with(worker("d2", RoleDecode), streams), with(worker("d3", RoleDecode), streams)}}
			policy, err := New(name, 3)
			if err != nil {
				t.Fatal(err)
			}
			seen := map[string]int{}
			for i := range 600 {
				d, err := policy.Pick(context.Background(), Request{ID: fmt.Sprint("r", i), Model: "m", PromptTokens: 1 << 20, Attempt: 1}, v)
				if err != nil || d.Prefill == nil {
					t.Fatalf("%+v, %v", d, err)
				}
				seen[d.Prefill.ID+d.Decode.ID]++
			}
			if name == NameLeastLoaded { // goes round both lists in step
				return
			}
			for k, n := range seen {
				if n < 60 || n > 140 {
					t.Errorf("of 600 choices of 6 alike %s was made %d times", k, n)
				}
			}
			if len(seen) != 6 {
				t.Errorf("only %v", seen)
			}
		})
	}
}

func TestJointDecidesWhetherToDisaggregate(t *testing.T) {
	long := Request{ID: "r", Model: "m", PromptTokens: 20000, Attempt: 1}
	good := Channel{SpeedBps: 10e9, RTT: 100 * time.Microsecond, TokenBytes: 64 << 10}
	pd := func(change func(*Candidate)) []Candidate {
		return []Candidate{worker("p", RolePrefill), with(worker("d", RoleDecode), change)}
	}
	for _, tt := range []struct {
		name    string
		workers []Candidate
		change  func(*Request, *Channel)
		want    string
	}{
		{"a long prompt", pd(streams), nil, "p>d"},
		{"a short one", pd(streams), func(r *Request, _ *Channel) { r.PromptTokens = 20 }, "d"},
		{"one that decode has mostly", pd(func(c *Candidate) { streams(c); c.CachedTokens = 19900 }), nil, "d"},
		{"one that decode has half of", pd(func(c *Candidate) { streams(c); c.CachedTokens = 10000 }), nil, "d"},
		{"one that both have half of", []Candidate{with(worker("p", RolePrefill), func(c *Candidate) { c.CachedTokens = 10000 }), with(worker("d", RoleDecode), func(c *Candidate) { streams(c); c.CachedTokens = 10000 })}, nil, "p>d"},
		{"a long prompt over a lame channel", pd(streams), func(_ *Request, c *Channel) { c.SpeedBps = 1e7 }, "d"},
		{"a long prompt behind others", []Candidate{with(worker("p", RolePrefill), func(c *Candidate) { c.Load = Load{PrefillTokens: 300000, Prefills: 9} }), with(worker("d", RoleDecode), streams)}, nil, "d"},
		{"the nearer decode worker", append(pd(streams), with(worker("d2", RoleDecode), func(c *Candidate) { streams(c); c.CachedTokens = 300 })), func(_ *Request, c *Channel) { c.SpeedBps = 1e9 }, "p>d2"},
		{"the faster prefill worker", append(pd(streams), with(worker("p2", RolePrefill), func(c *Candidate) { c.Speeds.PrefillRate = 12000 })), nil, "p2>d"},
		{"room rather than none", append(pd(func(c *Candidate) { c.Blocks = 1300; c.Load.HeldTokens = 20000 }), with(worker("d2", RoleDecode), func(c *Candidate) { streams(c); c.Blocks = 4000; c.Load.HeldTokens = 20000 })), nil, "p>d2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, way := long, good
			if tt.change != nil {
				tt.change(&r, &way)
			}
			v := &View{Now: now, Workers: tt.workers, Channel: func(_, _ *Worker) (Channel, bool) { return way, true }}
			d, err := (&Joint{}).Pick(context.Background(), r, v)
			if err != nil {
				t.Fatal(err)
			}
			if got := chosen(d); got != tt.want {
				t.Errorf("%s, want %s: %s\n%+v", got, tt.want, d.Reason, d.Options)
			}
			if !strings.Contains(d.Reason, "prefill") && r.PromptTokens > 1000 && d.Options[0].Prefill != "" {
				t.Errorf("the reason has no figures: %s", d.Reason)
			}
		})
	}
}

// A decision shows what was chosen, and then the cheapest of the others, in order, however many there were.
func TestJointShowsTheCheapest(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	more := 0
	for range 300 {
		w := weighing{}
		totals := make([]float64, 1+rng.IntN(40))
		for i := range totals {
			totals[i] = float64(rng.IntN(30))
			w.choices = append(w.choices, choice{whole: &side{c: &Candidate{Worker: &Worker{ID: fmt.Sprint(i)}}}, total: totals[i]})
		}
		picked := rng.IntN(len(totals))
		got := w.show(&w.choices[picked])
		want := []float64{totals[picked]}
		rest := slices.Sorted(slices.Values(slices.Delete(totals, picked, picked+1)))
		want = append(want, rest[:min(len(rest), optionsKept-1)]...)
		more += max(len(rest)-optionsKept, 0)
		shown := map[string]bool{}
		for i, o := range got {
			if len(got) != len(want) || o.Sum != want[i] || o.Chosen != (i == 0) || shown[o.Whole] {
				t.Fatalf("%+v of choice %d, want totals %v", got, picked, want)
			}
			shown[o.Whole] = true
		}
	}
	if more == 0 {
		t.Error("nothing was left out: the bound was not tried")
	}
}

func BenchmarkJoint(b *testing.B) {
	for _, n := range []int{8, 64, 256} {
		whole := &View{Now: now}
		pairs := &View{Now: now, Channel: func(_, _ *Worker) (Channel, bool) { return Channel{SpeedBps: 1e10, TokenBytes: 1e5}, true }}
		for i := range n {
			load := func(c *Candidate) {
				c.Load = Load{PrefillTokens: int64(i * 7919 % 50000), Prefills: int64(1 + i%3), Decodes: int64(i * 31 % 64), HeldTokens: int64(i * 1000)}
				c.Blocks, c.CachedTokens, c.Speeds = 8192, int64(i*512%4000), Speeds{PrefillRate: 20000, PrefillDoubt: 0.05, ITL: 0.01, ITLStream: 1e-4}
			}
			role := RolePrefill
			if i%2 > 0 {
				role = RoleDecode
			}
			whole.Workers = append(whole.Workers, with(worker(fmt.Sprint("w", i), RoleBoth), func(c *Candidate) { c.Dialect = DialectPlain; load(c) }))
			pairs.Workers = append(pairs.Workers, with(worker(fmt.Sprint("w", i), role), load))
		}
		for _, x := range []struct {
			name string
			v    *View
		}{{"whole", whole}, {"pairs", pairs}} {
			b.Run(fmt.Sprintf("%s/workers=%d", x.name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := (&Joint{}).Pick(context.Background(), Request{ID: "r", Model: "m", PromptTokens: 4000}, x.v); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
