package planner

import (
	"errors"
	"fmt"
	"time"
)

// predictive is the project's own planner. It takes what requests ask of prefill and of decode engines for two levels that wander, each with an error that grows with
// the time ahead. It keeps the requests of the last while as they came: with their bursts, their lengths and what of them was cached. Each interval it lets them come
// again to as many prefill engines as it could have, at the levels that may come to be until a change could be mended; works out how long decode engines' steps are
// then; and takes the pair of pools with the best worth: share of good requests against GPUs, less what the change costs.
type predictive struct {
	c        Config
	surfaces *Surfaces
	p        predictiveParams
	s        predictiveState
	scratch  rollout
}

type predictiveParams struct {
	interval time.Duration
	window   time.Duration // of the requests that come again, at most
	sample   int           // how many those are, at most
	thrift   float64       // how much a GPU counts against good requests: 1 maximises good requests a GPU, 0 good requests
	change   float64       // what an engine that is started costs, as a part of one
	gain     float64       // by how much less must be better
	patience int           // decisions in a row for less
	ttft     float64       // part of the goals that is aimed at
	itl      float64
	risk     float64 // how much of the levels' errors is reckoned with
	ahead    time.Duration
	horizon  float64 // seconds that are played at least
	stay     float64 // worth that pools other than those of the beginning must bring beside
}

type predictiveState struct {
	Home     Pools         `json:"home"` // pools at the first decision
	Began    time.Duration `json:"began_ns"`
	Decided  time.Duration `json:"decided_ns"`
	Prompts  demand        `json:"prompts"`
	Answers  demand        `json:"answers"`
	Arrivals []Arrival     `json:"arrivals,omitempty"`
	Lengths  lengths       `json:"lengths"`
	Less     int           `json:"less"`  // decisions in a row that wanted less
	Ended    int           `json:"ended"` // requests since the last decision
	Late     int           `json:"late"`  // and those of them that were not good
	Prefill  corrector     `json:"prefill"`
	Decode   corrector     `json:"decode"`
	Starts   corrector     `json:"starts"`
	Transfer float64       `json:"transfer_ms_per_token"`
}

const (
	hopeless    = 0.5
	arrivalsMin = 20 // before, nothing is decided
	fillsUp     = 30 * time.Second
	knowsLittle = time.Minute
)

// Prompts are seen as they come. Streams in progress are as many as came while an answer takes, so that what is seen of them at one moment and a
// little later is the same.
var (
	promptSeries = sampling{every: 5 * time.Second, near: 3, far: 15, first: 0.03, doubt: 5}
	answerSeries = sampling{every: 15 * time.Second, near: 3, far: 12, first: 0.02, doubt: 3}
)

func newPredictive(c Config, p *params) (*predictive, error) {
	second := float64(time.Second)
	q := &predictive{c: c, p: predictiveParams{
		interval: time.Duration(p.get("interval", 5, 1, 3600) * second),
		window:   time.Duration(p.get("window", 1200, 10, 86400) * second),
		sample:   int(p.get("sample", 1500, 50, 1e5)),
		thrift:   p.get("thrift", 0.4, 0, 1),
		change:   p.get("change", 0.1, 0, 10),
		gain:     p.get("gain", 0, 0, 1),
		patience: int(p.get("patience", 3, 1, 1000)),
		ttft:     p.get("ttft", 0.95, 0.1, 2),
		itl:      p.get("itl", 1, 0.1, 2),
		risk:     p.get("risk", 1, 0, 5),
		ahead:    time.Duration(p.get("ahead", 60, 0, 3600) * second),
		horizon:  p.get("horizon", 60, 0, 86400),
		stay:     p.get("stay", 0, 0, 10),
	}}
	var err error
	q.surfaces, err = c.surfaces()
	return q, err
}

func (q *predictive) Name() string { return "predictive" }

func (q *predictive) Step(o *Observation) Decision {
	q.learn(o)
	if o.At-q.s.Decided < q.p.interval {
		return Decision{}
	}
	q.s.Decided = o.At
	if o.Changing() || len(q.s.Arrivals) < arrivalsMin || len(q.s.Lengths.Done) == 0 {
		return Decision{}
	}
	d := q.decide(o)
	q.s.Ended, q.s.Late = 0, 0
	return d
}

// late tells whether requests are late in fact, and not only by what is foreseen from the few that may have come: those that ended lately, or what
// waits for prefill engines.
func (q *predictive) late(o *Observation) bool {
	return q.s.Ended >= arrivalsMin && float64(q.s.Late) > hopeless*float64(q.s.Ended) || q.scratch.backlog > q.c.TTFT.Seconds()*float64(max(o.Prefill.Ready+o.Whole.Ready, 1))
}

// learn takes what is new.
func (q *predictive) learn(o *Observation) {
	s := &q.s
	s.Arrivals = append(s.Arrivals, o.Arrived...)
	for _, d := range o.Done {
		s.Ended++
		if d.TTFT > q.c.TTFT || d.ITL > q.c.ITL {
			s.Late++
		}
		s.Lengths.add(d.Output, o.At-d.Lasted, o.At)
	}
	old := 0
	for old < len(s.Arrivals) && (o.At-s.Arrivals[old].At > q.p.window || len(s.Arrivals)-old > q.p.sample) {
		old++
	}
	s.Arrivals = s.Arrivals[:copy(s.Arrivals, s.Arrivals[old:])]
	q.measure(o)
	for _, x := range o.DecodeSteps {
		if x.Streams > 0 && x.Prompt == 0 {
			n := float64(x.Streams)
			s.Decode.add(ms(x.Took), q.surfaces.ITL(n, float64(x.KV)/n))
		}
	}
	for _, x := range o.PrefillSteps {
		// Of a long prompt's later chunks the surface says less than they take: only whole prompts compare.
		if x.Prompt >= 64 && x.Streams == 0 && x.Prompt < q.surfaces.ChunkTokens {
			s.Prefill.add(ms(x.Took), q.surfaces.TTFT(float64(x.Prompt)))
		}
	}
	for _, took := range o.Started {
		s.Starts.add(took.Seconds(), q.surfaces.Start.Seconds())
	}
	if o.TransferTokens > 0 {
		perToken := ms(o.TransferTime) / float64(o.TransferTokens)
		if s.Transfer == 0 {
			s.Transfer = perToken
		}
		s.Transfer += 0.1 * (min(perToken, 5*s.Transfer) - s.Transfer)
	}
}

// measure takes what requests ask of engines now.
func (q *predictive) measure(o *Observation) {
	s := &q.s
	if s.Began == 0 && len(o.Arrived) > 0 {
		s.Began = o.At
	}
	if s.Began == 0 || o.At-s.Began < fillsUp { // there are fewer streams than there will be
		s.Prompts.At, s.Answers.At = o.At, o.At
		return
	}
	for _, a := range o.Arrived {
		s.Prompts.add(q.surfaces.Service(float64(a.Prompt), float64(a.Cached)) / 1e3)
	}
	s.Answers.add(q.decoding(o))
	s.Prompts.until(o.At, &promptSeries, func(sum float64, _ int) float64 { return sum / promptSeries.every.Seconds() })
	s.Answers.until(o.At, &answerSeries, func(sum float64, n int) float64 { return sum / float64(max(n, 1)) })
}

// decoding is how many engines would be busy with nothing but the streams that there are. A step takes what one of no streams does, and more for
// each stream and each token in its KV cache: of n engines' time the part 1 - bare step/step goes into those.
func (q *predictive) decoding(o *Observation) float64 {
	pool := q.decoders(o)
	streams, ready := float64(pool.Running+pool.Waiting), float64(pool.Ready)
	if streams == 0 || ready == 0 {
		return 0
	}
	return ready * max(1-q.surfaces.Bare()/q.surfaces.ITL(streams/ready, q.context(o)), 0)
}

// asked is what decoding would be if nothing were held up: requests come as often as of late, and answers get as long.
func (q *predictive) asked(o *Observation) float64 {
	s, pool := &q.s, q.decoders(o)
	streams, ready := float64(pool.Running+pool.Waiting), float64(pool.Ready)
	came := 0
	for i := len(s.Arrivals) - 1; i >= 0 && o.At-s.Arrivals[i].At < answerSeries.every; i-- {
		came++
	}
	if came == 0 || streams == 0 || ready == 0 || len(s.Lengths.Done) == 0 {
		return 0
	}
	q.scratch.lengths = s.Lengths.sample(q.scratch.lengths[:0], o.Making, came, o.At-answerSeries.every)
	tokens := 0
	for _, n := range q.scratch.lengths {
		tokens += n
	}
	perToken := (q.surfaces.ITL(streams/ready, q.context(o)) - q.surfaces.Bare()) * ready / streams // milliseconds of an engine
	return float64(tokens) / answerSeries.every.Seconds() * max(perToken, 0) / 1e3
}

// context is how many tokens a stream has in the KV cache, on average; of engines that do not say how full it is, those of prompts that came lately.
func (q *predictive) context(o *Observation) float64 {
	pool := q.decoders(o)
	if pool.KVUsage == 0 {
		tokens := 0
		for _, a := range q.s.Arrivals {
			tokens += a.Prompt
		}
		return float64(tokens) / float64(max(len(q.s.Arrivals), 1))
	}
	return pool.KVUsage * float64(pool.Ready) * float64(q.surfaces.KVTokens) / float64(max(pool.Running+pool.Waiting, 1))
}

func (q *predictive) decoders(o *Observation) *Pool {
	if q.c.Limits.Undivided {
		return &o.Whole
	}
	return &o.Decode
}

// startTime is how long an engine takes to start, in seconds.
func (q *predictive) startTime() float64 {
	return q.surfaces.Start.Seconds() * q.s.Starts.factor()
}

// decide compares the pools there are with others.
func (q *predictive) decide(o *Observation) Decision {
	now := o.Now()
	if least := q.c.Limits.Least(); now.Prefill < least.Prefill || now.Decode < least.Decode || now.Whole < least.Whole {
		want := Pools{Prefill: max(now.Prefill, least.Prefill), Decode: max(now.Decode, least.Decode), Whole: max(now.Whole, least.Whole)}
		return Decision{Want: want, Reason: fmt.Sprintf("there are %s, and at least %s must be", now, want)}
	}
	if q.s.Home == (Pools{}) {
		q.s.Home = now
	}
	r := &q.scratch
	r.load(q, o)
	at := q.judge(now, now)
	if at.good < hopeless {
		r.hopeless(o)
		at = q.judge(now, now)
	}
	best := at
	for _, want := range q.candidates(now) {
		if v := q.judge(want, now); v.worth > best.worth || v.worth == best.worth && v.gpus < best.gpus {
			best = v
		}
	}
	d := Decision{Want: best.pools, Figures: []Figure{{"prefill_demand", r.prompts.mean}, {"prefill_unsure", r.prompts.unsure}, {"decode_demand", r.answers.mean}, {"decode_unsure", r.answers.unsure},
		{"first_tokens_now", at.early}, {"first_tokens_then", best.early}, {"tokens_now", at.steady}, {"tokens_then", best.steady}, {"worth_now", at.worth}, {"worth_then", best.worth},
		{"prefill_correction", q.s.Prefill.factor()}, {"decode_correction", q.s.Decode.factor()}}}
	d.Reason = fmt.Sprintf("prompts ask for %.2f engines (+-%.0f %%), answers for %.2f (+-%.0f %%): %s has %.1f %% good with %d GPUs, %s %.1f %% with %d",
		r.prompts.mean, 100*r.prompts.unsure, r.answers.mean, 100*r.answers.unsure, now, 100*at.good, at.gpus, best.pools, 100*best.good, best.gpus)
	switch {
	case best.pools == now, o.At-q.s.Began < knowsLittle && !q.late(o):
		q.s.Less = 0
		return Decision{}
	case best.gpus >= at.gpus:
		q.s.Less = 0
	case best.worth-at.worth < q.p.gain:
		q.s.Less = 0
		return Decision{}
	default:
		if q.s.Less++; q.s.Less < q.p.patience {
			return Decision{}
		}
		q.s.Less = 0
	}
	return d
}

// judge tells what pools are worth, less what it costs to have them in place of others, and what it takes to leave those of the beginning.
func (q *predictive) judge(p, now Pools) judged {
	v := q.scratch.judge(p)
	// An engine that starts takes its GPU long before it is of use, and others take over when one goes. Of many engines one is less.
	v.worth -= q.p.change * float64(started(now, p).Times(q.c.Limits.EngineGPUs)) / float64(now.Times(q.c.Limits.EngineGPUs))
	for _, differs := range []bool{p.Prefill != q.s.Home.Prefill, p.Decode != q.s.Home.Decode, p.Whole != q.s.Home.Whole} {
		if differs {
			v.worth -= q.p.stay
		}
	}
	return v
}

// candidates are pools that can be had with one change: a few engines fewer or more, and others at once where many are short or idle.
func (q *predictive) candidates(now Pools) []Pools {
	around := func(n int) []int {
		var list []int
		for _, k := range []int{n / 2, n * 2 / 3, n * 4 / 5} {
			if k >= 1 && k < n-1-n/10 {
				list = append(list, k)
			}
		}
		for k := max(1, n-1-n/10); k <= n+4; k++ {
			list = append(list, k)
		}
		for _, k := range []int{n * 3 / 2, n * 2, n * 3} {
			if k > n+4 {
				list = append(list, k)
			}
		}
		return list
	}
	var all []Pools
	add := func(p Pools) {
		if p != now && p.Times(q.c.Limits.EngineGPUs) <= q.c.Limits.MaxGPUs && p.Times(q.c.Limits.EngineGPUs) >= q.c.Limits.MinGPUs {
			all = append(all, p)
		}
	}
	if h := q.s.Home; h.Whole > 0 && q.c.Limits.Undivided || h.Prefill > 0 && h.Decode > 0 && h.Whole == 0 && !q.c.Limits.Undivided {
		add(h)
	}
	if q.c.Limits.Undivided {
		for _, w := range around(now.Whole) {
			add(Pools{Whole: w})
		}
		return all
	}
	for _, p := range around(now.Prefill) {
		for _, d := range around(now.Decode) {
			add(Pools{Prefill: p, Decode: d})
		}
	}
	return all
}

func (q *predictive) State() ([]byte, error) { return marshalState(&q.s) }

func (q *predictive) Restore(state []byte) error {
	err := restoreState(state, &q.s)
	q.s.Prompts.learn(&promptSeries)
	q.s.Answers.learn(&answerSeries)
	return err
}

// check finds what learn cannot have come to.
func (s *predictiveState) check() error {
	for _, a := range s.Arrivals {
		if a.At < 0 || a.At > timeMost || a.Cached < 0 || a.Cached > a.Prompt || a.Prompt > tokensMost {
			return fmt.Errorf("a request of %d tokens, %d of them cached, came at %s", a.Prompt, a.Cached, a.At)
		}
	}
	switch {
	case s.Decided < 0 || s.Decided > timeMost || s.Began < 0 || s.Began > timeMost:
		return fmt.Errorf("it began at %s and decided at %s", s.Began, s.Decided)
	case min(s.Home.Prefill, s.Home.Decode, s.Home.Whole) < 0 || max(s.Home.Prefill, s.Home.Decode, s.Home.Whole) > countMost:
		return fmt.Errorf("it began with %s", s.Home)
	case s.Ended < 0 || s.Ended > countMost || s.Late < 0 || s.Late > s.Ended:
		return fmt.Errorf("%d of %d requests were late", s.Late, s.Ended)
	case s.Less < 0 || s.Less > countMost || s.Transfer < 0:
		return errors.New("a count is below nothing, or beyond all that can be counted")
	}
	return errors.Join(s.Prompts.check(), s.Answers.check(), s.Lengths.check(), s.Prefill.check(), s.Decode.check(), s.Starts.check())
}

var _ Planner = (*predictive)(nil)
