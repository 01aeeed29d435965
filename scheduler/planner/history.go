package planner

import "time"

// History makes series of what a planner saw and did, a value of each for every while: for whoever keeps them. It is used by one goroutine.
type History struct {
	Limits Limits
	// TTFT and ITL are the goals by which answers are counted as good.
	TTFT, ITL time.Duration
	// Every is the while. 0 is 10 s.
	Every time.Duration

	begun    bool
	last     time.Duration
	arrived  int
	done     int
	good     int
	ttft     time.Duration
	itl      time.Duration
	itls     int
	changes  int
	decision []Figure
}

// historyEvery is one interval of the planners' own.
const historyEvery = 10 * time.Second

// Add takes an observation, what the planner said to it, and the change that followed, if one did. After a while, and with each change, it
// returns the series' values; their names' first parts group them.
func (h *History) Add(o *Observation, d *Decision, act *Act) []Figure {
	if !h.begun { // a planner that goes on where another ended begins late
		h.begun, h.last = true, max(0, o.At-o.Since)
	}
	h.arrived += len(o.Arrived)
	for i := range o.Done {
		x := &o.Done[i]
		h.done++
		h.ttft += x.TTFT
		if x.Output > 1 {
			h.itls++
			h.itl += x.ITL
		}
		if x.TTFT <= h.TTFT && x.ITL <= h.ITL {
			h.good++
		}
	}
	if len(d.Figures) > 0 {
		h.decision = append(h.decision[:0], d.Figures...)
	}
	if act != nil {
		h.changes++
	}
	every := h.Every
	if every <= 0 {
		every = historyEvery
	}
	since := o.At - h.last
	if act == nil && since < every || since <= 0 {
		return nil
	}
	all := h.pools(o)
	all = append(all, Figure{"load/requests_per_s", float64(h.arrived) / since.Seconds()}, Figure{"load/answers_per_s", float64(h.done) / since.Seconds()},
		Figure{"changes", float64(h.changes)})
	if h.done > 0 {
		n := float64(h.done)
		all = append(all, Figure{"answers/good_share", float64(h.good) / n}, Figure{"answers/ttft_ms", ms(h.ttft) / n})
	}
	if h.itls > 0 {
		all = append(all, Figure{"answers/itl_ms", ms(h.itl) / float64(h.itls)})
	}
	for _, f := range h.decision {
		all = append(all, Figure{"decision/" + f.Name, f.Value})
	}
	h.last, h.arrived, h.done, h.good, h.ttft, h.itl, h.itls, h.decision = o.At, 0, 0, 0, 0, 0, 0, h.decision[:0]
	return all
}

// pools are the values of the engines there are.
func (h *History) pools(o *Observation) []Figure {
	all := []Figure{{"gpus", float64(o.gpus(h.Limits.EngineGPUs))}}
	add := func(name string, p *Pool) {
		all = append(all, Figure{name + "/ready", float64(p.Ready)}, Figure{name + "/starting", float64(p.Starting)}, Figure{name + "/draining", float64(p.Draining)},
			Figure{name + "/waiting", float64(p.Waiting)}, Figure{name + "/running", float64(p.Running)}, Figure{name + "/kv_usage", p.KVUsage})
	}
	if h.Limits.Undivided {
		add("whole", &o.Whole)
		return all
	}
	add("prefill", &o.Prefill)
	add("decode", &o.Decode)
	return all
}
