package planner

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// SLAInput is what the formulas of Dynamo's SLA planner take: what is forecast for an interval, and what surfaces answer to it.
type SLAInput struct {
	Interval     float64 `json:"interval_s"`
	Requests     float64 `json:"requests"` // in the interval
	Prompt       float64 `json:"isl"`
	Output       float64 `json:"osl"`
	PrefillRate  float64 `json:"prefill_tokens_per_gpu_s"`
	DecodeRate   float64 `json:"decode_tokens_per_gpu_s"`
	PrefillScale float64 `json:"prefill_correction"` // 0 is 1
	PrefillGPUs  int     `json:"prefill_gpus"`       // of an engine
	DecodeGPUs   int     `json:"decode_gpus"`
	Least        int     `json:"min_endpoint"` // engines of each kind; 0 is 1
	Budget       int     `json:"budget"`       // 0 is none
}

// SLASize are the formulas. formula is what they say, which with a budget can pass it by their rounding; sized is what is left when enough
// was cut.
func SLASize(in SLAInput) (formula, sized Pools) {
	scale := min(1, in.PrefillScale)
	if in.PrefillScale == 0 {
		scale = 1
	}
	least := max(in.Least, 1)
	p := engines(in.Requests*in.Prompt/in.Interval*scale/in.PrefillRate/float64(in.PrefillGPUs), least)
	d := engines(in.Requests*in.Output/in.Interval/in.DecodeRate/float64(in.DecodeGPUs), least)
	return SLABudget(Pools{Prefill: p, Decode: d}, in.PrefillGPUs, in.DecodeGPUs, least, in.Budget)
}

// enginesMax bounds what a rate of next to nothing asks for.
const enginesMax = 1_000_000

// engines are whole ones, least at least. What is no number is no load.
func engines(load float64, least int) int {
	if !(load > 0) {
		return least
	}
	return max(int(math.Ceil(min(load, enginesMax))), least)
}

// SLABudget scales pools to a budget as the formula says, and then cuts them until it holds: by the engine that leaves fewest GPUs unused.
func SLABudget(want Pools, prefillGPUs, decodeGPUs, least, budget int) (formula, sized Pools) {
	each := Pools{Prefill: prefillGPUs, Decode: decodeGPUs}
	formula = want
	if total := want.Times(each); budget > 0 && total > budget {
		s := float64(budget) / float64(total)
		p := max(least, int(math.RoundToEven(float64(want.Prefill)*s)))
		d := max(least, int(math.RoundToEven(float64(budget-p*prefillGPUs)/float64(decodeGPUs))))
		formula = Pools{Prefill: p, Decode: d}
	}
	sized = formula
	for budget > 0 && sized.Times(each) > budget {
		over := sized.Times(each) - budget
		switch {
		case sized.Prefill <= least && sized.Decode <= least:
			return formula, sized // the least does not fit: there is nothing to cut
		case sized.Decode <= least, sized.Prefill > least && (prefillGPUs >= over) == (decodeGPUs >= over) && prefillGPUs <= decodeGPUs,
			sized.Prefill > least && prefillGPUs >= over && decodeGPUs < over:
			sized.Prefill--
		default:
			sized.Decode--
		}
	}
	return formula, sized
}

// sla is Dynamo's SLA planner: each interval it sizes both pools by the formulas, from forecasts of requests and lengths.
type sla struct {
	c        Config
	surfaces *Surfaces
	interval time.Duration
	// predictor is the one of each series that is asked.
	predictor string
	s         slaState
}

type slaState struct {
	Decided  time.Duration `json:"decided_ns"`
	Requests best          `json:"requests"`
	Prompt   best          `json:"prompt"`
	Output   best          `json:"output"`
	// What was seen in the interval.
	Arrived int     `json:"arrived"`
	Prompts float64 `json:"prompts"`
	Done    int     `json:"done"`
	Outputs float64 `json:"outputs"`
	TTFT    float64 `json:"ttft_ms"`
	ITL     float64 `json:"itl_ms"`
	ITLs    int     `json:"itls"`
	Lasted  float64 `json:"lasted_s"`
	DoneIn  float64 `json:"done_prompts"`
}

// newSLA takes interval in seconds, and which predictor forecasts in place of the last value: kalman=1, arima=1, smooth=1, moving=1, best=1 or seasonal=N, a season of N intervals.
func newSLA(c Config, p *params) (*sla, error) {
	if c.Limits.Undivided {
		return nil, fmt.Errorf("sla: its formulas are for prefill and decode engines; use another planner for undivided ones")
	}
	s := &sla{c: c, interval: time.Duration(p.get("interval", 30, 1, 3600) * float64(time.Second)), predictor: "constant"}
	chosen := 0
	for _, name := range []string{"kalman", "arima", "smooth", "moving", "best"} {
		if p.get(name, 0, 0, 1) > 0 {
			s.predictor = name
			chosen++
		}
	}
	season := int(p.get("seasonal", 0, 0, periodMost))
	if season > 0 {
		s.predictor = "seasonal"
		chosen++
	}
	if chosen > 1 {
		return nil, fmt.Errorf("sla: %d predictors are chosen; choose one", chosen)
	}
	for _, b := range []*best{&s.s.Requests, &s.s.Prompt, &s.s.Output} {
		*b = *newBest(season)
	}
	var err error
	s.surfaces, err = c.surfaces()
	return s, err
}

// forecast takes the next value of a series, and says what the one after it may be.
func (s *sla) forecast(b *best, v float64) float64 {
	p := b.named(s.predictor)
	p.Add(v)
	return p.Predict(1)
}

func (s *sla) Name() string { return "sla" }

func (s *sla) Step(o *Observation) Decision {
	st := &s.s
	for _, a := range o.Arrived {
		st.Arrived++
		st.Prompts += float64(a.Prompt)
	}
	for _, d := range o.Done {
		st.Done++
		st.Outputs += float64(d.Output)
		st.DoneIn += float64(d.Prompt)
		st.TTFT += ms(d.TTFT)
		st.Lasted += d.Lasted.Seconds() - d.TTFT.Seconds()
		if d.Output > 1 {
			st.ITLs++
			st.ITL += ms(d.ITL)
		}
	}
	if o.At-st.Decided < s.interval {
		return Decision{}
	}
	seconds := (o.At - st.Decided).Seconds()
	d := s.decide(o, seconds)
	st.Decided = o.At
	st.Arrived, st.Prompts, st.Done, st.Outputs, st.TTFT, st.ITL, st.ITLs, st.Lasted, st.DoneIn = 0, 0, 0, 0, 0, 0, 0, 0, 0
	return d
}

func (s *sla) decide(o *Observation, seconds float64) Decision {
	st := &s.s
	if st.Done == 0 || st.Arrived == 0 {
		return Decision{} // nothing to learn from
	}
	requests := s.forecast(&st.Requests, float64(st.Arrived)/seconds)
	prompt, output := s.forecast(&st.Prompt, st.Prompts/float64(st.Arrived)), s.forecast(&st.Output, st.Outputs/float64(st.Done))
	context := prompt + output/2
	pCorr := st.TTFT / float64(st.Done) / s.surfaces.TTFT(st.DoneIn/float64(st.Done))
	dCorr := 1.0
	if st.ITLs > 0 && o.Decode.Ready > 0 {
		streams := float64(st.Done) / float64(o.Decode.Ready) * (st.Lasted / float64(st.Done)) / seconds
		dCorr = st.ITL / float64(st.ITLs) / s.surfaces.ITL(streams, context)
		if !(dCorr > 0) { // as in Dynamo, whose factor may come to 0: the goal itself then
			dCorr = 1
		}
	}
	each := s.c.Limits.EngineGPUs
	in := SLAInput{Interval: 1, Requests: requests, Prompt: prompt, Output: output, PrefillRate: s.surfaces.PrefillRate(prompt),
		DecodeRate: s.surfaces.BestRate(ms(s.c.ITL)/dCorr, context), PrefillScale: pCorr, PrefillGPUs: each.Prefill, DecodeGPUs: each.Decode, Budget: s.c.Limits.MaxGPUs}
	formula, sized := SLASize(in)
	d := Decision{Want: sized, Figures: []Figure{{"requests_per_s", in.Requests}, {"isl", prompt}, {"osl", output}, {"p_corr", pCorr}, {"d_corr", dCorr},
		{"prefill_rate", in.PrefillRate}, {"decode_rate", in.DecodeRate}}}
	d.Reason = fmt.Sprintf("%.2f requests/s of %.0f and %.0f tokens want %s", in.Requests, prompt, output, formula)
	if formula != sized {
		d.Reason += fmt.Sprintf(", %s by the budget", sized)
	}
	return d
}

func (s *sla) State() ([]byte, error)     { return marshalState(&s.s) }
func (s *sla) Restore(state []byte) error { return restoreState(state, &s.s) }

func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }

// check finds what forecasts cannot have come to.
func (s *slaState) check() error {
	return errors.Join(s.Requests.check(), s.Prompt.check(), s.Output.check())
}

var _ Planner = (*sla)(nil)
