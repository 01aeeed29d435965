package operate

import (
	"math"
	"time"

	"github.com/headrace/headrace/internal/routers"
	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/planner"
)

// meter works out what steps and transfers took between two looks, from what engines and node daemons have added up by each of them. It tells only of
// what can be told apart so: streams that were the same in number all along, prompts that found an engine with nothing to do. Planners take what they
// are told for a sample.
type meter struct {
	workers  map[string]reading
	channels map[[2]string]uint64 // bytes sent, by both ends
	told     Measured
}

// Measured is what planners have been told of steps and transfers since this process leads.
type Measured struct {
	PrefillSteps   int     `json:"prefill_steps"`
	DecodeSteps    int     `json:"decode_steps"`
	TransferTokens int64   `json:"transfer_tokens"`
	TransferUs     float64 `json:"transfer_us_per_token,omitempty"` // the last time
}

// reading is what a router has read of a worker.
type reading struct {
	router string
	routers.Engine
}

// lap is what lies between two readings.
type lap struct {
	was, is *reading
	seconds float64
}

const (
	lapMost = 5 * time.Second
	// gapsLeast is how many tokens must have been made for their mean to mean something; promptShare how many prompt tokens may have been computed beside,
	// as a part of them.
	gapsLeast   = 8
	promptShare = 0.25
	// streamsOff is by what part streams may differ from what the engine said before and after, and streamsLeast by how many in any case.
	streamsOff, streamsLeast = 0.2, 0.5
	// waitedShare is how long prompts may have waited, as a part of what computing them took: who waited may have been computed together with others.
	waitedShare = 0.1
)

// measure adds what is new to an observation.
func (m *meter) measure(seen *Seen, engines []*Record, obs *planner.Observation) {
	m.steps(seen, engines, obs)
	m.transfers(seen, engines, obs)
	m.told.PrefillSteps += len(obs.PrefillSteps)
	m.told.DecodeSteps += len(obs.DecodeSteps)
}

// reading is what the first router that has fresh figures of a worker says of it.
func (s *Seen) reading(id string) (reading, bool) {
	for i := range s.Routers {
		if w := s.Routers[i].Worker(id); w != nil && w.Engine != nil && !w.Engine.Stale && w.Engine.Timing != nil {
			return reading{s.Routers[i].Router.ID, *w.Engine}, true
		}
	}
	return reading{}, false
}

func (m *meter) steps(seen *Seen, engines []*Record, obs *planner.Observation) {
	now := make(map[string]reading, len(engines))
	for _, r := range engines {
		is, ok := seen.reading(r.ID)
		if !ok {
			continue
		}
		now[r.ID] = is
		was, ok := m.workers[r.ID]
		if !ok || was.router != is.router {
			continue
		}
		l := lap{was: &was, is: &is, seconds: is.ReadAt.Sub(was.ReadAt).Seconds()}
		if l.seconds <= 0 || l.seconds > lapMost.Seconds() || l.anew() {
			continue
		}
		if s, ok := l.prefill(r.Role); ok {
			obs.PrefillSteps = append(obs.PrefillSteps, s)
		}
		if s, ok := l.decode(r.Role); ok {
			obs.DecodeSteps = append(obs.DecodeSteps, s)
		}
	}
	m.workers = now
}

// anew tells whether the engine began to count anew.
func (l *lap) anew() bool {
	a, b := l.was.Timing, l.is.Timing
	return b.Gaps < a.Gaps || b.GapSeconds < a.GapSeconds || b.Prefills < a.Prefills || b.PrefillSeconds < a.PrefillSeconds || b.QueueSeconds < a.QueueSeconds || b.PromptTokens < a.PromptTokens ||
		b.Cached != a.Cached
}

// prefill is the mean prompt of an engine that had nothing to do before and after. One that also decodes may have had one alone, whose answer came behind it.
func (l *lap) prefill(role string) (planner.Step, bool) {
	a, b := l.was.Timing, l.is.Timing
	n, took, waited := b.Prefills-a.Prefills, b.PrefillSeconds-a.PrefillSeconds, b.QueueSeconds-a.QueueSeconds
	tokens := float64(b.PromptTokens - a.PromptTokens)
	switch {
	case n < 1 || role == connector.Decode || role == connector.Whole && n > 1:
		return planner.Step{}, false
	case l.was.Running+l.was.Waiting+l.is.Running+l.is.Waiting > 0 || waited > waitedShare*took || took <= 0:
		return planner.Step{}, false
	case b.Cached && (l.is.PrefixHits != l.was.PrefixHits || l.is.ExternalHits != l.was.ExternalHits):
		return planner.Step{}, false // nobody knows how much was computed
	}
	s := planner.Step{Prompt: int(math.Round(tokens / float64(n))), Took: time.Duration(took / float64(n) * float64(time.Second))}
	return s, s.Prompt > 0 && s.Took > 0
}

// decode is the mean step of an engine that made tokens for about the same streams all along. How many those were follows from how long they all waited
// for tokens in that time (Little, A Proof for the Queuing Formula L = λW, Operations Research 9, 1961): an engine that had fewer for a while is left out, as its steps
// and its streams would be means over different things.
func (l *lap) decode(role string) (planner.Step, bool) {
	a, b := l.was.Timing, l.is.Timing
	gaps, waited, prompts := b.Gaps-a.Gaps, b.GapSeconds-a.GapSeconds, b.PromptTokens-a.PromptTokens
	if role == connector.Prefill || gaps < gapsLeast || waited <= 0 || float64(prompts) > promptShare*float64(gaps) || l.was.Running < 1 || l.is.Running < 1 {
		return planner.Step{}, false
	}
	streams, said := waited/l.seconds, float64(l.was.Running+l.is.Running)/2
	room := float64(l.is.Blocks * l.is.BlockTokens)
	if math.Abs(streams-said) > max(streamsLeast, streamsOff*said) || l.was.KVUsage < 0 || l.is.KVUsage < 0 || room <= 0 {
		return planner.Step{}, false
	}
	s := planner.Step{Streams: max(1, int(math.Round(streams))), KV: int64((l.was.KVUsage + l.is.KVUsage) / 2 * room), Took: time.Duration(waited / float64(gaps) * float64(time.Second))}
	return s, s.Took > 0
}

// transfers adds up what went over channels from prefill to decode engines, at the speed that the daemons measured while there was something to send.
func (m *meter) transfers(seen *Seen, engines []*Record, obs *planner.Observation) {
	type lender struct{ bytes, n float64 }
	from, to := map[string]lender{}, map[string]bool{}
	for _, r := range engines {
		for i := range seen.Routers {
			w := seen.Routers[i].Worker(r.ID)
			if w == nil || w.NodeID == "" {
				continue
			}
			switch {
			case r.Role == connector.Decode:
				to[w.NodeID] = true
			case r.Role == connector.Prefill && w.KVTokenBytes > 0:
				x := from[w.NodeID]
				from[w.NodeID] = lender{x.bytes + w.KVTokenBytes, x.n + 1}
			}
			break
		}
	}
	now := map[[2]string]uint64{}
	for i := range seen.Routers {
		for _, c := range seen.Routers[i].Channels {
			key := [2]string{c.From, c.To}
			if _, told := now[key]; told {
				continue // by another router
			}
			now[key] = c.SentBytes
			was, known := m.channels[key]
			x := from[c.From]
			if !known || c.SentBytes <= was || c.SpeedBps <= 0 || !to[c.To] || x.n == 0 {
				continue
			}
			bytes := float64(c.SentBytes - was)
			obs.TransferTokens += int64(bytes * x.n / x.bytes)
			obs.TransferTime += time.Duration(bytes / c.SpeedBps * float64(time.Second))
		}
	}
	m.channels = now
	if obs.TransferTokens > 0 {
		m.told.TransferTokens += obs.TransferTokens
		m.told.TransferUs = float64(obs.TransferTime.Microseconds()) / float64(obs.TransferTokens)
	}
}
