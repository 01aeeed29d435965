package planner

import (
	"math"
	"slices"
)

// rollout lets requests come again to pools of other sizes. Prefill and decode are each played once for each size: what a request
// meets there depends on the other only by when it gets there, which counts little. It keeps its memory.
type rollout struct {
	q        *predictive
	limits   *Limits
	now      Pools
	start    float64   // seconds until what is started is ready
	came     []float64 // seconds, at the pace at which they came
	arrivals int       // how many came: they come again more than once
	cases    [3]outlook
	at       []float64 // seconds, in the case that is played
	service  []float64 // seconds of prefill
	prompt   []float64
	output   []float64
	backlog  float64 // seconds of work that waits for prefill engines, in all
	lengths  []int
	left     []float64 // tokens of streams that there are already
	held     float64   // tokens of KV cache of each of them
	servers  []server
	tokens   []float64 // of prompts to compute
	chunk    float64
	ends     endings
	began    []float64
	queue    []int32
	spare    [][]float64
	ttft     float64
	itl      float64
	factor   float64
	transfer float64
	thrift   float64
}

// outlook is one of the rates that requests may come at, and what came of pools then.
type outlook struct {
	weight float64
	at     []float64
	early  map[int][]float64
	steady map[int][]float64
}

// The rates that are tried: the forecast, and so many of its standard errors beside it, weighted such that mean and variance are a normal
// distribution's. What is enough for the forecast may be far from enough for little more.
var outlooks = [3]struct{ off, weight float64 }{{0, 2.0 / 3}, {-1.7320508075688772, 1.0 / 6}, {1.7320508075688772, 1.0 / 6}}

// judged is what came of pools.
type judged struct {
	pools Pools
	gpus  int
	good  float64
	worth float64
}

// load takes what the planner knows. Requests come so many times as fast as they came, with that standard error.
func (r *rollout) load(q *predictive, o *Observation, faster, unsure float64) {
	r.q, r.limits, r.now = q, &q.c.Limits, o.Now()
	r.start = q.startTime()
	s := &q.s
	at := r.came[:0]
	r.service, r.prompt, r.output = r.service[:0], r.prompt[:0], r.output[:0]
	r.tokens, r.thrift = r.tokens[:0], q.p.thrift
	if r.chunk = float64(q.surfaces.ChunkTokens); r.chunk <= 0 {
		r.chunk = math.Inf(1)
	}
	slow := q.s.Prefill.factor()
	first := s.Arrivals[0].At
	lasts := (o.At - first).Seconds()
	rounds := 1 + int(min(q.p.horizon*faster/max(lasts, 1), 20))
	outputs := s.Lengths.sample(r.lengths[:0], o.Making, len(s.Arrivals)*rounds, first)
	r.lengths = outputs
	for k := range rounds {
		for i, a := range s.Arrivals {
			at = append(at, (a.At-first).Seconds()+lasts*float64(k))
			r.service = append(r.service, q.surfaces.Service(float64(a.Prompt), float64(a.Cached))*slow/1e3)
			r.tokens = append(r.tokens, float64(max(a.Prompt-a.Cached, 1)))
			r.prompt = append(r.prompt, float64(a.Prompt))
			r.output = append(r.output, float64(outputs[k*len(s.Arrivals)+i]))
		}
	}
	streams := &o.Decode
	if r.limits.Undivided {
		streams = &o.Whole
	}
	r.before(outputs, streams.Running+streams.Waiting)
	r.ttft, r.itl = q.c.TTFT.Seconds()*q.p.ttft, q.c.ITL.Seconds()*q.p.itl
	r.factor, r.transfer = s.Decode.factor(), s.Transfer/1e3
	pool := &o.Prefill
	if r.limits.Undivided {
		pool = &o.Whole
	}
	r.backlog = float64(pool.WaitingTokens) / q.surfaces.PrefillRate(4096) * slow / float64(max(r.limits.EngineGPUs.Prefill, 1))
	r.came, r.arrivals = at, len(s.Arrivals)
	for k := range r.cases {
		c := &r.cases[k]
		for _, m := range []map[int][]float64{c.early, c.steady} {
			for _, bits := range m {
				r.spare = append(r.spare, bits)
			}
		}
		c.early, c.steady, c.weight = map[int][]float64{}, map[int][]float64{}, outlooks[k].weight
		pace := faster * max(1+outlooks[k].off*unsure, 0.2)
		c.at = append(c.at[:0], at...)
		for i := range c.at {
			c.at[i] /= pace
		}
	}
}

// before are the streams that there are already: of the answers laid end to end, what is left of those that evenly spaced places fall
// into, as longer ones are found running more often.
func (r *rollout) before(outputs []int, running int) {
	r.left, r.held = r.left[:0], 0
	total := 0
	for _, n := range outputs {
		total += n
	}
	at, end := 0, outputs[0]
	for k := range running {
		place := (float64(k) + 0.5) / float64(running) * float64(total)
		for float64(end) < place {
			at++
			end += outputs[at]
		}
		r.left = append(r.left, float64(end)-place)
	}
	for _, n := range r.prompt {
		r.held += n / float64(len(r.prompt))
	}
}

func (r *rollout) bits() []float64 {
	if n := len(r.spare); n > 0 {
		b := r.spare[n-1]
		r.spare = r.spare[:n-1]
		return slices.Grow(b[:0], len(r.service))[:len(r.service)]
	}
	return make([]float64, len(r.service))
}

// judge is the worth of pools: the logarithm of the share of good requests, less that of their GPUs as far as thrift goes.
func (r *rollout) judge(p Pools) judged {
	prefill, decode := p.Prefill, p.Decode
	ready, steadyNow := r.now.Prefill, r.now.Decode
	if r.limits.Undivided {
		prefill, decode, ready, steadyNow = p.Whole, p.Whole, r.now.Whole, r.now.Whole
	}
	v := judged{pools: p, gpus: p.Times(r.limits.EngineGPUs)}
	for k := range r.cases {
		c := &r.cases[k]
		r.at = c.at
		early, ok := c.early[prefill]
		if !ok {
			early = r.prefill(prefill, ready)
			c.early[prefill] = early
		}
		steady, ok := c.steady[decode]
		if !ok {
			steady = r.decode(decode, steadyNow)
			c.steady[decode] = steady
		}
		good := 0.0
		for i := range early {
			good += early[i] * steady[i]
		}
		v.good += c.weight * good / float64(len(early))
	}
	v.worth = math.Log(v.good+1e-9) - r.thrift*math.Log(float64(v.gpus))
	return v
}

// doubt is the standard error of the difference in worth of two pools that were judged, from how it differs between stretches of time.
func (r *rollout) doubt(a, b Pools) float64 {
	one, two := r.judge(a), r.judge(b)
	c := &r.cases[0]
	r.at = c.at
	early, steady := [2][]float64{c.early[r.prefills(a)], c.early[r.prefills(b)]}, [2][]float64{c.steady[r.decodes(a)], c.steady[r.decodes(b)]}
	n, sum, squares, stretch, until := 0.0, 0.0, 0.0, 0.0, r.at[0]+stretchSeconds
	for i, at := range r.at[:r.arrivals] { // when they come once more, they tell nothing new
		if at >= until {
			n, sum, squares, stretch, until = n+1, sum+stretch, squares+stretch*stretch, 0, at+stretchSeconds
		}
		stretch += early[1][i]*steady[1][i]/max(two.good, 1e-9) - early[0][i]*steady[0][i]/max(one.good, 1e-9)
	}
	n, sum, squares = n+1, sum+stretch, squares+stretch*stretch
	if n < 2 {
		return math.Inf(1)
	}
	variance := max(squares/n-sum*sum/n/n, 0) * n / (n - 1)
	return math.Sqrt(variance*n) / float64(r.arrivals)
}

// stretchSeconds are taken as one sample: requests close to each other meet the same queues.
const stretchSeconds = 30

func (r *rollout) prefills(p Pools) int { return p.Prefill + p.Whole }
func (r *rollout) decodes(p Pools) int  { return p.Decode + p.Whole }

// server is a prefill engine that computes chunks of the prompts that wait there.
type server struct {
	until  float64 // when its step ends
	work   float64 // seconds of what waits behind that step
	queue  []int32
	head   int
	done   float64 // tokens of the first in the queue that are computed
	ending []int32 // whose last tokens are in the step
}

// prefill has prompts computed by n engines, of which those beyond ready start late, each by the one with the least to do; and says what
// each first token is worth by when it comes.
func (r *rollout) prefill(n, ready int) []float64 {
	for len(r.servers) < n {
		r.servers = append(r.servers, server{})
	}
	for i := range r.servers[:n] {
		v := &r.servers[i]
		*v = server{until: r.backlog / float64(min(n, ready)), queue: v.queue[:0], ending: v.ending[:0]}
		if i >= ready {
			v.until = r.start
		}
	}
	bits := r.bits()
	for i, at := range r.at {
		k, least := 0, math.Inf(1)
		for j := range r.servers[:n] {
			v := &r.servers[j]
			r.advance(v, at, bits)
			if w := max(v.until, at) + v.work; w < least {
				k, least = j, w
			}
		}
		v := &r.servers[k]
		v.queue = append(v.queue, int32(i))
		v.work += r.service[i]
		r.advance(v, at, bits)
	}
	for j := range r.servers[:n] {
		r.advance(&r.servers[j], math.Inf(1), bits)
	}
	return bits
}

// advance completes the steps that end until a moment, and begins the next ones.
func (r *rollout) advance(v *server, at float64, bits []float64) {
	for v.until <= at {
		for _, i := range v.ending {
			bits[i] = worthOf(v.until-r.at[i], r.ttft)
		}
		v.ending = v.ending[:0]
		if v.head == len(v.queue) {
			v.queue, v.head, v.work = v.queue[:0], 0, 0
			return
		}
		begins := max(v.until, r.at[v.queue[v.head]])
		budget, took := r.chunk, 0.0
		for v.head < len(v.queue) && budget > 0 {
			i := v.queue[v.head]
			n := min(budget, r.tokens[i]-v.done)
			took += r.service[i] * n / r.tokens[i]
			budget -= n
			if v.done += n; v.done < r.tokens[i] {
				break
			}
			v.ending = append(v.ending, i)
			v.done = 0
			v.head++
		}
		v.work -= took
		v.until = begins + took
	}
}

// worthOf is 1 in time, and little after it: less the later, so that of two hopeless pools the larger is better.
func worthOf(took, goal float64) float64 {
	if took <= goal {
		return 1
	}
	return 0.1 * goal / took
}

// ending is a stream that ends when each stream has had so many tokens since the beginning.
type ending struct {
	tokens float64
	who    int32
}

// endings is a heap, the first to end first.
type endings []ending

func (h *endings) push(e ending) {
	*h = append(*h, e)
	for i := len(*h) - 1; i > 0; {
		up := (i - 1) / 2
		if (*h)[up].tokens <= (*h)[i].tokens {
			return
		}
		(*h)[i], (*h)[up] = (*h)[up], (*h)[i]
		i = up
	}
}

func (h *endings) pop() ending {
	top := (*h)[0]
	n := len(*h) - 1
	(*h)[0] = (*h)[n]
	*h = (*h)[:n]
	for i := 0; ; {
		least := 2*i + 1
		if least >= n {
			return top
		}
		if least+1 < n && (*h)[least+1].tokens < (*h)[least].tokens {
			least++
		}
		if (*h)[i].tokens <= (*h)[least].tokens {
			return top
		}
		(*h)[i], (*h)[least] = (*h)[least], (*h)[i]
		i = least
	}
}

// decode has answers made by n engines that share the streams evenly, and tells whose tokens come in time. All streams get tokens at
// the same pace, so that one count of tokens says when each ends.
func (r *rollout) decode(n, ready int) []float64 {
	bits := r.bits()
	r.ends, r.queue = r.ends[:0], r.queue[:0]
	r.began = append(r.began[:0], r.at...)
	now, tokens, kv := 0.0, 0.0, 0.0
	room := 0.97 * float64(r.q.surfaces.KVTokens)
	most := math.Inf(1)
	if r.q.surfaces.Streams > 0 {
		most = float64(r.q.surfaces.Streams)
	}
	enter := func(i int32) {
		kv += r.prompt[i]
		r.ends.push(ending{tokens: tokens + max(r.output[i]-1, 0), who: i})
	}
	for _, left := range r.left {
		kv += r.held
		r.ends.push(ending{tokens: left, who: -1})
	}
	next, head := 0, 0
	for next < len(r.at) || len(r.ends) > 0 {
		engines := float64(n)
		if now < r.start && n > ready {
			engines = float64(ready)
		}
		pace, until := math.Inf(1), math.Inf(1) // seconds a token, and when the next stream ends
		if m := float64(len(r.ends)); m > 0 {
			pace = r.q.surfaces.ITL(m/engines, kv/m) * r.factor / 1e3
			until = now + (r.ends[0].tokens-tokens)*pace
		}
		arrives := math.Inf(1)
		if next < len(r.at) {
			arrives = r.at[next] + r.service[next] + r.transfer*r.prompt[next]*0.5
			arrives = max(arrives, now)
		}
		if arrives < until {
			if m := float64(len(r.ends)); m > 0 {
				tokens += (arrives - now) / pace
				kv += m * (arrives - now) / pace
			}
			now = arrives
			r.began[next] = now
			r.queue = append(r.queue, int32(next))
			next++
		} else {
			kv += float64(len(r.ends)) * (r.ends[0].tokens - tokens)
			e := r.ends.pop()
			now, tokens = until, e.tokens
			r.ended(bits, e, now, &kv)
		}
		for head < len(r.queue) && (len(r.ends) == 0 || kv+r.prompt[r.queue[head]] <= room*engines && float64(len(r.ends)) < most*engines) {
			enter(r.queue[head])
			head++
		}
	}
	return bits
}

// ended is a stream that has all its tokens.
func (r *rollout) ended(bits []float64, e ending, now float64, kv *float64) {
	if e.who < 0 {
		*kv -= r.held + e.tokens
		return
	}
	*kv -= r.prompt[e.who] + max(r.output[e.who]-1, 0)
	bits[e.who] = 1
	if r.output[e.who] > 1 {
		bits[e.who] = worthOf(now-r.began[e.who], r.itl*(r.output[e.who]-1))
	}
}
