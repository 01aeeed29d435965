package planner

import (
	"math"
	"time"
)

// rollout foresees what pools of other sizes would make of what is to come. Prefill engines are played: requests come again, with their bursts. Of decode engines it
// works out how long a step takes, as streams that last for seconds even bursts out. What a request meets in one depends little on the other, and each is foreseen
// once for each size. It keeps its memory.
type rollout struct {
	q       *predictive
	limits  *Limits
	now     Pools
	start   float64 // seconds until what is started is ready
	prompts outlook
	answers outlook
	was     float64   // engines that the requests that come again keep busy with prompts, at the pace at which they came
	came    []float64 // seconds, at that pace
	at      []float64 // seconds, at the pace that is played
	service []float64 // seconds of prefill
	tokens  []float64 // of prompts to compute
	chunk   float64
	beside  float64 // part of an undivided engine's time with prompts that streams' steps would not take anyway
	slow    float64 // how much longer a prompt takes than it does alone
	backlog float64 // seconds of work that waits for prefill engines, in all
	servers []server
	bits    []float64
	lengths []int
	waits   []float64 // milliseconds a token, of each answer, that its KV cache is on its way
	early   map[int]float64
	steady  map[int]float64
	ttft    float64 // seconds
	itl     float64 // milliseconds
	bare    float64 // milliseconds
	full    float64 // milliseconds that a step takes when the KV cache is full
	thrift  float64
}

// outlook is a demand as it may come to be: its mean, and the standard error as a part of it.
type outlook struct{ mean, unsure float64 }

// fifths are the middles of five parts of a normal distribution that weigh the same, in standard deviations.
var fifths = [5]float64{-1.2815515655446004, -0.5244005127080407, 0, 0.5244005127080407, 1.2815515655446004}

const (
	// stepsDiffer is by how much the mean steps of single requests differ from that of all, as a standard deviation.
	stepsDiffer = 0.06
	// waitsMost is how many answers are looked at for how long their KV caches are on their way.
	waitsMost = 200
	// askedMost bounds how many times what is decoded what is asked for may be, where requests are held up.
	askedMost = 2
	// busyMost bounds the part of an undivided engine's time that goes into answers, where prompts are foreseen.
	busyMost = 0.95
)

// judged is what came of pools.
type judged struct {
	pools  Pools
	gpus   int
	early  float64 // share of first tokens that come in time
	steady float64 // and of answers whose other tokens do
	good   float64
	worth  float64
}

// load takes what the planner knows.
func (r *rollout) load(q *predictive, o *Observation) {
	r.q, r.limits, r.now = q, &q.c.Limits, o.Now()
	r.start, r.thrift = q.startTime(), q.p.thrift
	r.ttft, r.itl = q.c.TTFT.Seconds()*q.p.ttft, ms(q.c.ITL)*q.p.itl
	factor := q.s.Decode.factor()
	r.bare, r.full = q.surfaces.Bare()*factor, q.surfaces.Full(q.context(o))*factor
	if r.chunk = float64(q.surfaces.ChunkTokens); r.chunk <= 0 {
		r.chunk = math.Inf(1)
	}
	if r.limits.Undivided {
		r.beside = max(1-q.surfaces.Bare()/q.surfaces.TTFT(float64(max(q.surfaces.ChunkTokens, 1))), 0)
	}
	r.again(o)
	r.outlooks(o)
	r.transfers(o)
	pool := &o.Prefill
	if r.limits.Undivided {
		pool = &o.Whole
	}
	r.backlog = float64(pool.WaitingTokens) / q.surfaces.PrefillRate(4096) * q.s.Prefill.factor() / float64(max(r.limits.EngineGPUs.Prefill, 1))
	r.early, r.steady = map[int]float64{}, map[int]float64{}
}

// again lays the requests that come again one behind the other, as often as it takes.
func (r *rollout) again(o *Observation) {
	s, slow := &r.q.s, r.q.s.Prefill.factor()
	r.came, r.service, r.tokens, r.was = r.came[:0], r.service[:0], r.tokens[:0], 0
	first := s.Arrivals[0].At
	lasts := max((o.At - first).Seconds(), 1)
	for k := range 1 + int(min(r.q.p.horizon/lasts, 20)) {
		for _, a := range s.Arrivals {
			r.came = append(r.came, (a.At-first).Seconds()+lasts*float64(k))
			r.service = append(r.service, r.q.surfaces.Service(float64(a.Prompt), float64(a.Cached))*slow/1e3)
			r.tokens = append(r.tokens, float64(max(a.Prompt-a.Cached, 1)))
		}
	}
	for _, took := range r.service[:len(s.Arrivals)] {
		r.was += took / lasts
	}
}

// outlooks are what the demands may come to be until a change could be mended.
func (r *rollout) outlooks(o *Observation) {
	q := r.q
	slow := q.s.Prefill.factor()
	r.prompts, r.answers = q.s.Prompts.outlook(r.was/slow, q.p.ahead, &promptSeries), q.s.Answers.outlook(q.decoding(o), q.p.ahead, &answerSeries)
	r.prompts.mean *= slow
	// Decode engines meet what is above the level for a while, too. What bursts do to prefill engines is played.
	r.answers.unsure = math.Sqrt(r.answers.unsure*r.answers.unsure + q.s.Answers.noise)
}

// outlook is the level so far ahead; of a demand of which nothing has been seen yet it is what is given.
func (d *demand) outlook(given float64, ahead time.Duration, s *sampling) outlook {
	if len(d.Seen) == 0 {
		first := level{off: noiseFirst, drift: s.first * s.first}
		return outlook{given, first.ahead(ahead, s)}
	}
	return outlook{d.mean, d.ahead(ahead, s)}
}

// hopeless takes it that most requests are late with the pools that there are. First that is mended: thrift would rather give all of them up. And what is decoded is less
// than what is asked for then.
func (r *rollout) hopeless(o *Observation) {
	r.thrift /= 5
	r.answers.mean = max(r.answers.mean, min(r.q.asked(o), askedMost*r.answers.mean))
	clear(r.early)
	clear(r.steady)
}

// transfers are how much longer answers' tokens take to come on average because the KV cache must come first: of answers as long as those of late.
func (r *rollout) transfers(o *Observation) {
	s := &r.q.s
	r.waits = r.waits[:0]
	if r.limits.Undivided || s.Transfer == 0 {
		r.waits = append(r.waits, 0)
		return
	}
	r.lengths = s.Lengths.sample(r.lengths[:0], o.Making, len(s.Arrivals), s.Arrivals[0].At)
	for i := 0; i < len(s.Arrivals); i += 1 + len(s.Arrivals)/waitsMost {
		r.waits = append(r.waits, s.Transfer*float64(s.Arrivals[i].Prompt)/float64(max(r.lengths[i]-1, 1)))
	}
}

// judge is the worth of pools: the logarithm of the share of good requests, less that of their GPUs as far as thrift goes.
func (r *rollout) judge(p Pools) judged {
	v := judged{pools: p, gpus: p.Times(r.limits.EngineGPUs)}
	if r.limits.Undivided {
		v.early, v.steady = r.firstTokens(p.Whole, r.now.Whole), r.tokensSteady(p.Whole)
	} else {
		v.early, v.steady = r.firstTokens(p.Prefill, r.now.Prefill), r.tokensSteady(p.Decode)
	}
	v.good = v.early * v.steady
	v.worth = math.Log(v.good+1e-9) - r.thrift*math.Log(float64(v.gpus))
	return v
}

// firstTokens is what first tokens are worth that n engines make, of which those beyond ready start late.
func (r *rollout) firstTokens(n, ready int) float64 {
	if v, ok := r.early[n]; ok {
		return v
	}
	r.slow = 1
	if r.limits.Undivided {
		// The steps that compute prompts make tokens for streams, too.
		r.slow = 1 / (1 - min(r.answers.mean/float64(n), busyMost))
	}
	sum := 0.0
	for _, z := range fifths {
		pace := min(max(r.prompts.mean*math.Exp(z*r.prompts.unsure*r.q.p.risk)/max(r.was, 1e-9), 0.05), 20)
		r.at = r.at[:0]
		for _, at := range r.came {
			r.at = append(r.at, at/pace)
		}
		sum += mean(r.prefill(n, ready))
	}
	r.early[n] = sum / float64(len(fifths))
	return r.early[n]
}

// tokensSteady is the share of answers whose tokens n engines make in time.
func (r *rollout) tokensSteady(n int) float64 {
	if v, ok := r.steady[n]; ok {
		return v
	}
	sum := 0.0
	for _, z := range fifths {
		busy := r.answers.mean * math.Exp(z*r.answers.unsure*r.q.p.risk)
		if r.limits.Undivided {
			busy += r.prompts.mean * r.beside
		}
		busy /= float64(n)
		step := r.bare / (1 - busy)
		if busy >= 1 || step > r.full {
			continue // more streams than there is room for
		}
		for _, wait := range r.waits {
			sum += 0.5 * math.Erfc(-((r.itl-wait)/step-1)/stepsDiffer/math.Sqrt2) / float64(len(r.waits))
		}
	}
	// A little is worth more than nothing: of two hopeless pools the larger is better.
	r.steady[n] = (0.99*sum + 0.01*float64(n)/(float64(n)+r.answers.mean)*float64(len(fifths))) / float64(len(fifths))
	return r.steady[n]
}

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
	r.bits = append(r.bits[:0], r.at...)
	bits := r.bits
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
		v.work += r.service[i] * r.slow
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
			took += r.service[i] * r.slow * n / r.tokens[i]
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
