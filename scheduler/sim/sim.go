package sim

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/trace"
)

// Options of a run.
type Options struct {
	Table *Table
	// Limits of the planner. EngineGPUs is taken from the table.
	Limits planner.Limits
	// Goal of each request: its first token within TTFT, and its tokens ITL apart on average.
	TTFT, ITL time.Duration
	// First are the pools that are ready in the beginning; zero is one engine of each kind.
	First planner.Pools
	// From and To bound what is counted: requests that come in between, and GPU time. To 0 is the trace's end. What is before From is
	// replayed all the same.
	From, To time.Duration
	// Look is how often the planner observes. 0 is 1 s.
	Look time.Duration
	// StayDrained lets streams end where they are when their engine drains, in place of moving them to another one.
	StayDrained bool
	Seed        uint64
	// OnAct is told of each change that the planner makes.
	OnAct func(planner.Act)
	// Watch is the planner.Loop's; nil is nobody.
	Watch func(*planner.Observation, *planner.Decision, *planner.Act)
}

// longest is how long answers are waited for after the last request of a trace; what has not ended then is no good.
const longest = time.Hour

// sim is one run.
type sim struct {
	o       Options
	loop    planner.Loop
	rng     *rand.Rand
	source  trace.Reader
	next    trace.Request
	more    bool
	now     int64
	events  events
	engines []*engine
	reqs    []request
	free    []int32
	nobody  fifo // requests for whom no engine is ready

	gpus     int
	gpuSince int64
	gpuNs    int64 // in all until gpuSince, times GPUs
	lastLook int64
	seen     planner.Observation
	report   Report
	underway int
}

// Run replays a trace with a planner.
func Run(source trace.Reader, p planner.Planner, o Options) (*Report, error) {
	s := newSim(source, p, o)
	if err := s.begun(); err != nil {
		return nil, err
	}
	if err := s.run(); err != nil {
		return nil, err
	}
	s.report.end(s)
	return &s.report, nil
}

func newSim(source trace.Reader, p planner.Planner, o Options) *sim {
	if o.Look <= 0 {
		o.Look = time.Second
	}
	o.Limits.EngineGPUs = o.Table.EngineGPUs()
	if o.First == (planner.Pools{}) {
		o.First = o.Limits.Least()
	}
	s := &sim{o: o, loop: planner.Loop{Planner: p, Limits: o.Limits, Watch: o.Watch}, rng: rand.New(rand.NewPCG(o.Seed, 0x706c616e)), source: source}
	s.report.begin(p.Name())
	return s
}

// begun makes the first engines and reads the first request.
func (s *sim) begun() error {
	if err := s.o.Limits.Check(); err != nil {
		return err
	}
	if first := s.o.Limits.Cut(s.o.First); first != s.o.First {
		return fmt.Errorf("begin with %s: only %s are within the budget of %d GPUs", s.o.First, first, s.o.Limits.MaxGPUs)
	}
	for r, n := range []int{s.o.First.Prefill, s.o.First.Decode, s.o.First.Whole} {
		for range n {
			s.engines[s.add(role(r))].state = ready
		}
	}
	s.events.push(int64(s.o.Look), lookAgain, 0)
	return s.fetch()
}

// fetch reads the request that comes next.
func (s *sim) fetch() error {
	switch err := s.source.Next(&s.next); {
	case errors.Is(err, io.EOF):
		s.more = false
	case err != nil:
		return err
	default:
		s.more = true
	}
	return nil
}

func (s *sim) run() error {
	end := int64(0)
	for s.more || s.underway > 0 {
		if s.more && int64(s.next.At) <= s.events.heap[0].at {
			s.now = int64(s.next.At)
			end = s.now + int64(longest)
			s.arrive()
			if err := s.fetch(); err != nil {
				return err
			}
			continue
		}
		e := s.events.pop()
		if s.now = e.at; !s.more && s.now > end {
			break
		}
		switch e.kind {
		case stepEnds:
			s.end(e.who)
		case gotReady:
			s.ready(e.who)
		case kvLanded:
			s.land(e.who)
		case lookAgain:
			s.look()
			s.events.push(s.now+int64(s.o.Look), lookAgain, 0)
		}
	}
	return nil
}

// jitter is a factor around 1.
func (s *sim) jitter(times float64) float64 {
	if s.o.Table.Jitter == 0 {
		return 1
	}
	return 1 + s.o.Table.Jitter*times*(2*s.rng.Float64()-1)
}

// account adds what GPUs were taken until now, before their number changes.
func (s *sim) account(change int) {
	s.gpuNs += int64(s.gpus) * (s.now - s.gpuSince)
	s.gpuSince = s.now
	s.gpus += change
	s.report.GPUsMost = max(s.report.GPUsMost, s.gpus)
}

// arrive takes the request that comes next.
func (s *sim) arrive() {
	s.report.arrived(s)
	id := int32(len(s.reqs))
	if n := len(s.free); n > 0 {
		id, s.free = s.free[n-1], s.free[:n-1]
	} else {
		s.reqs = append(s.reqs, request{})
	}
	r := &s.reqs[id]
	blocks := r.Blocks
	*r = request{Request: s.next, at: s.now, from: -1, to: -1, counted: s.counts()}
	r.Blocks, s.next.Blocks = s.next.Blocks, blocks // their memory is used again in turns
	s.underway++
	if !s.fitsAnywhere(r) {
		s.report.refused(r)
		s.forget(id)
		return
	}
	s.dispatch(id)
	s.seen.Arrived = append(s.seen.Arrived, planner.Arrival{At: time.Duration(s.now), Prompt: s.reqs[id].Prompt, Cached: s.reqs[id].cached})
}

// counts tells whether now is among what is counted.
func (s *sim) counts() bool {
	return s.now >= int64(s.o.From) && (s.o.To == 0 || s.now < int64(s.o.To))
}

func (s *sim) fitsAnywhere(r *request) bool {
	t := s.o.Table
	if s.o.Limits.Undivided {
		return int64(r.Prompt+r.Output) <= t.Whole.KVTokens
	}
	return int64(r.Prompt) <= t.Prefill.KVTokens && int64(r.Prompt+r.Output) <= t.Decode.KVTokens
}

func (s *sim) forget(id int32) {
	s.underway--
	s.free = append(s.free, id)
}

// finish is the last token of a request.
func (s *sim) finish(id int32) {
	r := &s.reqs[id]
	itl := int64(0)
	if r.Output > 1 {
		itl = (s.now - r.first) / int64(r.Output-1)
	}
	d := planner.Done{Prompt: r.Prompt, Output: r.Output, Cached: r.cached, TTFT: time.Duration(r.first - r.at), ITL: time.Duration(itl), Lasted: time.Duration(s.now - r.at)}
	s.seen.Done = append(s.seen.Done, d)
	s.report.finished(s, r, &d)
	s.forget(id)
}

// look shows the planner what there is, and does what it says.
func (s *sim) look() {
	o := &s.seen
	o.At, o.Since = time.Duration(s.now), time.Duration(s.now-s.lastLook)
	s.lastLook = s.now
	for i, p := range []*planner.Pool{&o.Prefill, &o.Decode, &o.Whole} {
		s.pool(role(i), p)
	}
	s.making()
	s.report.looked(s, o)
	act, acts := s.loop.Step(o)
	o.Arrived, o.Done, o.PrefillSteps, o.DecodeSteps, o.Started = o.Arrived[:0], o.Done[:0], o.PrefillSteps[:0], o.DecodeSteps[:0], o.Started[:0]
	o.TransferTokens, o.TransferTime = 0, 0
	if !acts {
		return
	}
	s.report.Acts++
	if s.o.OnAct != nil {
		s.o.OnAct(act)
	}
	s.change(prefill, act.Want.Prefill-act.Had.Prefill)
	s.change(decode, act.Want.Decode-act.Had.Decode)
	s.change(whole, act.Want.Whole-act.Had.Whole)
}

// making counts the tokens of the answers in progress.
func (s *sim) making() {
	o := &s.seen
	o.Making = o.Making[:0]
	for _, e := range s.engines {
		if e.state == gone {
			continue
		}
		for _, st := range e.running {
			o.Making = append(o.Making, s.reqs[st.who].Output-int(st.end-e.steps))
		}
		for _, id := range e.landed {
			o.Making = append(o.Making, s.reqs[id].Output-int(s.reqs[id].left))
		}
	}
}

// pool sums up the engines of a kind.
func (s *sim) pool(r role, p *planner.Pool) {
	*p = planner.Pool{Waits: p.Waits[:0], Usages: p.Usages[:0]}
	for _, e := range s.engines {
		if e.role != r || e.state == gone {
			continue
		}
		switch e.state {
		case starting:
			p.Starting++
			continue
		case draining:
			p.Draining++
		case ready:
			p.Ready++
			p.KVUsage += e.usage()
			p.Waits = append(p.Waits, e.waiting.len()+e.pending.len())
			p.Usages = append(p.Usages, e.usage())
		}
		p.Waiting += e.waiting.len() + e.pending.len()
		p.WaitingTokens += int64(float64(e.queued) / 1e3 / max(e.t.PromptTokenUs, 1e-9))
		p.Running += e.filling.len() + e.streamsNow()
		if e.lastPrompt.Took > 0 {
			s.seen.PrefillSteps = append(s.seen.PrefillSteps, e.lastPrompt)
			e.lastPrompt = planner.Step{}
		}
		if e.lastDecode.Took > 0 {
			s.seen.DecodeSteps = append(s.seen.DecodeSteps, e.lastDecode)
			e.lastDecode = planner.Step{}
		}
	}
	if p.Ready > 0 {
		p.KVUsage /= float64(p.Ready)
	}
}
