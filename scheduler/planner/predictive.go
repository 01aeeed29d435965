package planner

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// predictive is the project's own planner. It keeps the requests of the last while, as they came: with their bursts, their lengths and
// what of them was cached. Each interval it lets them come again, at the pace that is forecast for when an engine ordered now is
// ready, to every pair of pools that it could have, by the engines' surfaces as corrected by what they did of late; and takes the pair with the
// best worth: share of good requests against GPUs.
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
	bin      time.Duration // of the forecast's series
	thrift   float64       // how much a GPU counts against good requests: 1 maximises good requests a GPU, 0 good requests
	gainUp   float64       // by how much more must be better
	gainDown float64       // by how much less must be better
	patience int           // decisions in a row for less
	ttft     float64       // part of the goals that is aimed at
	itl      float64
	floor    float64 // of the forecast, as a part of what was
	risk     float64 // how much of the forecast's error is reckoned with
	sure     float64 // standard errors that a gain must be above
	horizon  float64 // seconds that are played at least
	stay     float64 // worth that pools other than those of the beginning must bring beside
}

type predictiveState struct {
	Home     Pools         `json:"home"` // pools at the first decision
	Decided  time.Duration `json:"decided_ns"`
	Binned   time.Duration `json:"binned_ns"`
	InBin    int           `json:"in_bin"`
	Rate     best          `json:"rate"`
	Arrivals []Arrival     `json:"arrivals,omitempty"`
	Lengths  lengths       `json:"lengths"`
	Skill    skill         `json:"skill"`
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
	// unseenMost is how many of the forecast's intervals may lie between two observations.
	unseenMost = 6
)

func newPredictive(c Config, p *params) (*predictive, error) {
	second := float64(time.Second)
	q := &predictive{c: c, p: predictiveParams{
		interval: time.Duration(p.get("interval", 10, 1, 3600) * second),
		window:   time.Duration(p.get("window", 1200, 10, 86400) * second),
		sample:   int(p.get("sample", 1500, 50, 1e5)),
		bin:      time.Duration(p.get("bin", 10, 1, 3600) * second),
		thrift:   p.get("thrift", 0.5, 0, 1),
		gainUp:   p.get("up", 0.01, 0, 1),
		gainDown: p.get("down", 0.02, 0, 1),
		patience: int(p.get("patience", 3, 1, 1000)),
		ttft:     p.get("ttft", 0.95, 0.1, 2),
		itl:      p.get("itl", 0.95, 0.1, 2),
		floor:    p.get("floor", 1, 0, 1),
		risk:     p.get("risk", 1, 0, 5),
		sure:     p.get("sure", 1, 0, 10),
		horizon:  p.get("horizon", 180, 0, 86400),
		stay:     p.get("stay", 0, 0, 10),
	}}
	q.s.Rate = *newBest(int(max(2, p.get("period", 600, 10, 1e6)*second/float64(q.p.bin))))
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
	for _, a := range o.Arrived {
		s.Arrivals = append(s.Arrivals, a)
		s.InBin++
	}
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
	if unseen := o.At - s.Binned; unseen > unseenMost*q.p.bin {
		// Nobody looked for so long, or nobody planned: that is no time without requests.
		s.Binned = o.At
		s.InBin = 0
	}
	for o.At-s.Binned >= q.p.bin {
		s.Binned += q.p.bin
		rate := float64(s.InBin) / q.p.bin.Seconds()
		s.Rate.Add(rate)
		s.Skill.add(rate, s.Rate.Predict(bestAhead), q.was(o))
		s.InBin = 0
	}
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

// startTime is how long an engine takes to start, in seconds.
func (q *predictive) startTime() float64 {
	return q.surfaces.Start.Seconds() * q.s.Starts.factor()
}

// was is the rate of the requests that come again.
func (q *predictive) was(o *Observation) float64 {
	if len(q.s.Arrivals) == 0 {
		return 0
	}
	return float64(len(q.s.Arrivals)) / max((o.At-q.s.Arrivals[0].At).Seconds(), 1)
}

// forecast is the rate of requests when an engine that is ordered now is ready, and what it is in the window. Of what the predictor says
// beyond the window's rate, it takes the part that came true of late.
func (q *predictive) forecast(o *Observation) (ahead, was float64) {
	was = q.was(o)
	ahead = was
	if s := &q.s; s.Rate.N >= bestAhead {
		ahead += s.Skill.part() * (s.Rate.Predict(bestAhead) - was)
	}
	ahead = max(ahead, was*q.p.floor)
	return min(max(ahead, was/3), was*3), was
}

// unsure is the standard error of the forecast, as a part of it. What forecasts are held against differs by chance too, as the requests that
// come again do: that is taken out.
func (q *predictive) unsure(ahead float64) float64 {
	const least, atFirst = 0.03, 0.1
	off, known := q.s.Skill.off()
	chance := ahead / (bestSpan * q.p.bin.Seconds())
	part := math.Sqrt(max(off*off-chance, 0)) / max(ahead, 1e-9)
	part += (atFirst - part) * skillDoubt / (skillDoubt + known)
	return q.p.risk * min(max(part, least), 0.4)
}

// decide compares the pools there are with others.
func (q *predictive) decide(o *Observation) Decision {
	now := o.Now()
	if q.s.Home == (Pools{}) {
		q.s.Home = now
	}
	ahead, was := q.forecast(o)
	r := &q.scratch
	r.load(q, o, ahead/was, q.unsure(ahead))
	at := q.judge(now)
	if at.good < hopeless {
		// Where most requests are late, first that is mended: thrift would rather give all of them up.
		r.thrift /= 5
		at = q.judge(now)
	}
	best := at
	for _, want := range q.candidates(now) {
		if v := q.judge(want); v.worth > best.worth || v.worth == best.worth && v.gpus < best.gpus {
			best = v
		}
	}
	d := Decision{Want: best.pools, Figures: []Figure{{"rate", was}, {"rate_ahead", ahead}, {"rate_unsure", q.unsure(ahead)}, {"good_now", at.good}, {"good_then", best.good}, {"worth_now", at.worth}, {"worth_then", best.worth},
		{"prefill_correction", q.s.Prefill.factor()}, {"decode_correction", q.s.Decode.factor()}}}
	d.Reason = fmt.Sprintf("%.2f requests/s to come (%.2f were): %s has %.1f %% good with %d GPUs, %s %.1f %% with %d", ahead, was, now, 100*at.good, at.gpus, best.pools, 100*best.good, best.gpus)
	gain, unsure := best.worth-at.worth, 0.0
	if at.good >= hopeless || !q.late(o) {
		unsure = q.p.sure * r.doubt(now, best.pools)
	}
	switch {
	case best.pools == now:
		q.s.Less = 0
		return Decision{}
	case best.gpus >= at.gpus:
		q.s.Less = 0
		if gain < max(q.p.gainUp, unsure) {
			return Decision{}
		}
	default:
		if gain < max(q.p.gainDown, unsure) {
			q.s.Less = 0
			return Decision{}
		}
		if q.s.Less++; q.s.Less < q.p.patience {
			return Decision{}
		}
		q.s.Less = 0
	}
	return d
}

// judge tells what pools are worth, and what it takes to leave those of the beginning.
func (q *predictive) judge(p Pools) judged {
	v := q.scratch.judge(p)
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

func (q *predictive) State() ([]byte, error)     { return marshalState(&q.s) }
func (q *predictive) Restore(state []byte) error { return restoreState(state, &q.s) }

// check finds what learn cannot have come to.
func (s *predictiveState) check() error {
	for _, a := range s.Arrivals {
		if a.At < 0 || a.At > timeMost || a.Cached < 0 || a.Cached > a.Prompt || a.Prompt > tokensMost {
			return fmt.Errorf("a request of %d tokens, %d of them cached, came at %s", a.Prompt, a.Cached, a.At)
		}
	}
	switch {
	case s.Decided < 0 || s.Decided > timeMost || s.Binned < 0 || s.Binned > timeMost:
		return fmt.Errorf("it decided at %s, and counts from %s", s.Decided, s.Binned)
	case min(s.Home.Prefill, s.Home.Decode, s.Home.Whole) < 0 || max(s.Home.Prefill, s.Home.Decode, s.Home.Whole) > countMost:
		return fmt.Errorf("it began with %s", s.Home)
	case s.Ended < 0 || s.Ended > countMost || s.Late < 0 || s.Late > s.Ended:
		return fmt.Errorf("%d of %d requests were late", s.Late, s.Ended)
	case s.InBin < 0 || s.InBin > countMost || s.Less < 0 || s.Less > countMost || s.Skill.N < 0 || s.Skill.N > countMost || s.Transfer < 0:
		return errors.New("a count is below nothing, or beyond all that can be counted")
	}
	return errors.Join(s.Rate.check(), s.Lengths.check(), s.Prefill.check(), s.Decode.check(), s.Starts.check())
}

var _ Planner = (*predictive)(nil)
