package pairsim

import (
	"container/heap"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/headrace/headrace/router/pairing"
)

// Options of a comparison. Zero values are defaults.
type Options struct {
	// Prefill and Decode are how many workers there are of each role. Without prefill workers all serve whole requests.
	Prefill, Decode int // 0 and 8
	Timing          Timing
	Policies        []string // all
	Speedup         float64  // 20: the trace's time is divided by that
	// Load is the offered part of what a random policy can serve. The engines' speed is set such that the trace at Speedup is that. 0.8
	Load float64
	Seed uint64
}

// look is how often the router reads an engine's metrics, and at the soonest.
const look = time.Second

type event struct {
	at time.Duration
	n  int // in order of their making, for equal times
	do func(now time.Duration)
}

type events []event

func (h events) Len() int { return len(h) }
func (h events) Less(i, k int) bool {
	return h[i].at < h[k].at || h[i].at == h[k].at && h[i].n < h[k].n
}
func (h events) Swap(i, k int) { h[i], h[k] = h[k], h[i] }
func (h *events) Push(x any)   { *h = append(*h, x.(event)) }
func (h *events) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// sim is one run of one policy.
type sim struct {
	policy  pairing.Policy
	engines []*engine
	byID    map[string]*engine
	queue   events
	made    int
	lastNow time.Duration
	left    int // requests that have not ended

	ttft      []time.Duration
	estimates Estimates
	itl       time.Duration
	itlTokens int
	hit, all  int
	pairs     int
	err       error
}

func (s *sim) at(t time.Duration, do func(now time.Duration)) {
	s.made++
	heap.Push(&s.queue, event{t, s.made, do})
}

// run replays a trace, faster by speedup, or all at once when that is 0.
func run(trace []Request, o *Options, timing Timing, policy pairing.Policy, speedup float64) (*sim, error) {
	s := &sim{policy: policy, byID: map[string]*engine{}, left: len(trace)}
	s.fleet(o, timing)
	jobs := make([]job, len(trace))
	for i := range trace {
		jobs[i] = job{q: &trace[i], n: i}
		at := time.Duration(0)
		if speedup > 0 {
			at = time.Duration(trace[i].At / speedup * float64(time.Millisecond))
		}
		s.at(at, func(now time.Duration) { s.arrive(&jobs[i], now) })
	}
	s.at(0, s.scrape)
	for len(s.queue) > 0 && s.left > 0 && s.err == nil {
		e := heap.Pop(&s.queue).(event)
		s.lastNow = e.at
		e.do(e.at)
	}
	return s, s.err
}

func (s *sim) fleet(o *Options, timing Timing) {
	add := func(role pairing.Role, dialect string, n int) {
		for i := range n {
			id := fmt.Sprintf("%s%d", role, i)
			e := &engine{t: timing, cache: newCache(timing.Blocks), w: &pairing.Worker{ID: id, Role: role, Model: "m", NodeID: "n-" + id, NodeData: id, Dialect: dialect,
				BlockTokens: BlockTokens, Blocks: uint32(timing.Blocks)}}
			s.engines = append(s.engines, e)
			s.byID[id] = e
		}
	}
	if o.Prefill == 0 {
		add(pairing.RoleBoth, pairing.DialectPlain, o.Decode)
		return
	}
	add(pairing.RolePrefill, "native", o.Prefill)
	add(pairing.RoleDecode, "native", o.Decode)
}

// scrape is the router's look at all engines' metrics.
func (s *sim) scrape(now time.Duration) {
	for _, e := range s.engines {
		running := len(e.running) + len(e.filling)
		waiting := len(e.waiting) + len(e.arrived)
		e.said = pairing.Engine{Known: true, Running: int64(running), Waiting: int64(waiting), KVUsage: e.cache.usage()}
	}
	s.at(now+look, s.scrape)
}

// view is what the router knows, for one request.
func (s *sim) view(q *Request, now time.Duration) *pairing.View {
	v := &pairing.View{Now: time.Unix(0, 0).Add(now), Workers: make([]pairing.Candidate, len(s.engines)), Channel: func(p, _ *pairing.Worker) (pairing.Channel, bool) {
		t := &s.byID[p.ID].t
		return pairing.Channel{SpeedBps: t.ChannelBps, TokenBytes: t.TokenBytes}, true
	}}
	for i, e := range s.engines {
		load := e.load
		load.HeadFor = now - e.headSince
		v.Workers[i] = pairing.Candidate{Worker: e.w, Load: load, Engine: e.said, Speeds: e.learned.Speeds(), CachedTokens: int64(e.cache.cached(q.whole()) * BlockTokens)}
	}
	return v
}

// arrive decides about a request and hands it over.
func (s *sim) arrive(j *job, now time.Duration) {
	d, err := s.policy.Pick(context.Background(), pairing.Request{ID: strconv.Itoa(j.n), Model: "m", PromptTokens: int64(j.q.Input), Attempt: 1}, s.view(j.q, now))
	if err != nil {
		s.err = err
		return
	}
	if d.Whole != nil {
		j.prefill = s.byID[d.Whole.ID]
		j.decode = j.prefill
	} else {
		j.prefill, j.decode = s.byID[d.Prefill.ID], s.byID[d.Decode.ID]
		s.pairs++
	}
	p := j.prefill
	j.tokens = j.q.Input - int(min(d.CachedTokens, int64(j.q.Input-1)))
	j.sentAt = now
	j.estimate, j.estimated = d.Estimate()
	if p.load.Prefills == 0 {
		p.headSince = now
	}
	p.load.PrefillTokens += int64(j.tokens)
	p.load.Prefills++
	j.decode.load.Decodes++
	j.decode.load.HeldTokens += int64(j.q.Input)
	j.ahead = p.load.PrefillTokens
	if head := int64(float64(p.load.PrefillTokens-int64(j.tokens)) / float64(max(p.load.Prefills-1, 1))); p.load.Prefills > 1 { // some of the first is done
		j.ahead -= min(head, int64((now-p.headSince).Seconds()*p.learned.Speeds().PrefillRate))
	}
	p.waiting = append(p.waiting, j)
	s.wake(p, now)
}

func (s *sim) wake(e *engine, now time.Duration) {
	if e.busy {
		return
	}
	took, done := e.step()
	if done == nil {
		return
	}
	e.busy = true
	s.at(now+took, func(now time.Duration) {
		done(now, s)
		e.busy = false
		s.wake(e, now)
	})
}

// first: the client has the first token.
func (s *sim) first(j *job, now time.Duration) {
	p := j.prefill
	p.load.PrefillTokens -= int64(j.tokens)
	p.load.Prefills--
	p.headSince = now
	p.learned.Prefilled(j.ahead, now-j.sentAt)
	j.firstAt = now
	j.streams0 = j.decode.load.Decodes
	s.ttft = append(s.ttft, now-j.sentAt)
	if j.estimated {
		s.estimates.Add(j.estimate, (now - j.sentAt).Seconds())
	}
	s.hit += j.cached
	s.all += j.q.Input
}

// move carries the KV cache of a prompt to where it is decoded. Layers went while others were computed: a twentieth is left.
func (s *sim) move(j *job, now time.Duration) {
	d := j.decode
	cached := d.cache.cached(j.q.whole())
	all := float64(j.q.Input-cached*BlockTokens) * j.prefill.t.TokenBytes / j.prefill.t.ChannelBps
	hidden := float64(j.q.Input-j.cached) / j.prefill.t.PrefillRate
	left := max(all-hidden, all/20)
	var land func(now time.Duration)
	land = func(now time.Duration) {
		n, ok := d.reserve(j)
		if !ok { // D's blocks are short: it waits, as does P's
			s.at(now+time.Millisecond, land)
			return
		}
		d.cache.name(j.q.whole()[n:])
		j.prefill.free(j, true)
		s.wake(j.prefill, now)
		d.arrived = append(d.arrived, j)
		s.wake(d, now)
	}
	s.at(now+time.Duration(left*float64(time.Second)), land)
}

// finish: the client has the whole answer.
func (s *sim) finish(j *job, now time.Duration) {
	d := j.decode
	if n := j.q.Output - 1; n > 0 {
		s.itl += now - j.firstAt
		s.itlTokens += n
		if n >= 8 {
			d.learned.Decoded(float64(j.streams0+d.load.Decodes)/2, (now-j.firstAt)/time.Duration(n))
		}
	}
	d.load.Decodes--
	d.load.HeldTokens -= int64(j.q.Input)
	d.ends = append(d.ends, now)
	s.left--
}

// rate is what the engines can serve of what came all at once: see Saturation.
func (s *sim) rate() float64 {
	ends := make([][]time.Duration, len(s.engines))
	for i, e := range s.engines {
		ends[i] = e.ends
	}
	return Saturation(ends)
}

// Saturation is the requests a second of all engines together, each of them as long as it has enough to do: until all but a
// twentieth of its own were served. They were given everything at once, and ends are the times since then at which each
// engine's requests ended; they are sorted. Chance gives more to one engine than to another, the more so the shorter the
// trace, and when the last one ends says nothing of what all can serve.
func Saturation(ends [][]time.Duration) float64 {
	sum := 0.0
	for _, of := range ends {
		slices.Sort(of)
		if n := len(of) * 19 / 20; n > 0 {
			sum += float64(n) / max(of[n-1], 1).Seconds()
		}
	}
	return sum
}
