// Package planner decides how many engines there should be, of those that prefill, that decode and that do both. A planner is a
// function of what is observed and of its own state, which can be written down: it has no clock, no randomness and does no I/O,
// so that the same code plans for engines and for the simulator. It does not know what starts and stops engines.
package planner

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Pools are numbers of engines. Engines that both prefill and decode are Whole; there are either those or the other two.
type Pools struct {
	Prefill int `json:"prefill"`
	Decode  int `json:"decode"`
	Whole   int `json:"whole,omitempty"`
}

// Times is the sum of the products: with engines' GPUs, how many GPUs the pools take.
func (p Pools) Times(each Pools) int {
	return p.Prefill*each.Prefill + p.Decode*each.Decode + p.Whole*each.Whole
}

func (p Pools) String() string {
	if p.Whole > 0 {
		return fmt.Sprintf("%d", p.Whole)
	}
	return fmt.Sprintf("%dP+%dD", p.Prefill, p.Decode)
}

// Limits bound what may be planned.
type Limits struct {
	// EngineGPUs is what one engine of each kind takes.
	EngineGPUs Pools `json:"engine_gpus"`
	// MinGPUs and MaxGPUs bound all pools together.
	MinGPUs int `json:"min_gpus"`
	MaxGPUs int `json:"max_gpus"`
	// Undivided says that engines are Whole.
	Undivided bool `json:"undivided,omitempty"`
}

// Check says what is wrong with limits.
func (l *Limits) Check() error {
	least := l.Least().Times(l.EngineGPUs)
	switch e := l.EngineGPUs; {
	case l.Undivided && e.Whole < 1, !l.Undivided && (e.Prefill < 1 || e.Decode < 1):
		return errors.New("an engine takes at least one GPU")
	case l.MaxGPUs < least:
		return fmt.Errorf("a budget of %d GPUs is too small: one engine of each kind takes %d", l.MaxGPUs, least)
	case l.MinGPUs > l.MaxGPUs:
		return fmt.Errorf("the minimum of %d GPUs is above the maximum of %d", l.MinGPUs, l.MaxGPUs)
	}
	return nil
}

// Least is one engine of each kind that there is.
func (l *Limits) Least() Pools {
	if l.Undivided {
		return Pools{Whole: 1}
	}
	return Pools{Prefill: 1, Decode: 1}
}

// Cut takes engines away until the budget holds, from the kind that has most GPUs, and leaves one of each.
func (l *Limits) Cut(p Pools) Pools {
	if l.Undivided {
		return Pools{Whole: max(1, min(p.Whole, l.MaxGPUs/l.EngineGPUs.Whole))}
	}
	p = Pools{Prefill: max(p.Prefill, 1), Decode: max(p.Decode, 1)}
	for p.Times(l.EngineGPUs) > l.MaxGPUs && (p.Prefill > 1 || p.Decode > 1) {
		if p.Decode == 1 || p.Prefill > 1 && p.Prefill*l.EngineGPUs.Prefill > p.Decode*l.EngineGPUs.Decode {
			p.Prefill--
		} else {
			p.Decode--
		}
	}
	return p
}

// Raise adds engines until there are as many GPUs as there must be, as far as the budget allows it: first of a kind of which there would be fewer than
// there are (what had is), else of that which has fewest GPUs.
func (l *Limits) Raise(p, had Pools) Pools {
	for p.Times(l.EngineGPUs) < l.MinGPUs {
		next := p
		switch {
		case l.Undivided:
			next.Whole++
		case p.Prefill < had.Prefill && p.Decode >= had.Decode:
			next.Prefill++
		case p.Decode < had.Decode && p.Prefill >= had.Prefill:
			next.Decode++
		case p.Prefill*l.EngineGPUs.Prefill < p.Decode*l.EngineGPUs.Decode:
			next.Prefill++
		default:
			next.Decode++
		}
		if next.Times(l.EngineGPUs) > l.MaxGPUs {
			break
		}
		p = next
	}
	return p
}

// Pool is what is seen of the engines of one kind.
type Pool struct {
	Ready    int `json:"ready"`
	Starting int `json:"starting"`
	Draining int `json:"draining"`
	// Waiting requests have not begun here: to be prefilled, or for room in the KV cache. WaitingTokens are their prompts' tokens that
	// are not cached, as far as known.
	Waiting       int   `json:"waiting"`
	WaitingTokens int64 `json:"waiting_tokens"`
	Running       int   `json:"running"`
	// KVUsage is the share of the KV cache that requests hold, the mean over engines that are ready.
	KVUsage float64 `json:"kv_usage"`
	// Waits are the waiting requests of each engine that is ready; Usages their caches' used shares.
	Waits  []int     `json:"-"`
	Usages []float64 `json:"-"`
}

// Arrival is a request that came.
type Arrival struct {
	At     time.Duration
	Prompt int // tokens
	Cached int // of those, that the engine it was given to has cached
}

// Done is a request that was answered in full.
type Done struct {
	Prompt, Output int // tokens
	// Cached tokens of the prompt were not computed. TTFT is the time to the first token; ITL the mean time between the tokens, 0 if there
	// is only one.
	Cached    int
	TTFT, ITL time.Duration
	Lasted    time.Duration // from its coming to its last token
}

// Step is one pass of an engine: prompt tokens computed, streams that got a token, and tokens in those streams' KV cache.
type Step struct {
	Prompt  int
	Streams int
	KV      int64
	Took    time.Duration
}

// Observation is what was seen since the observation before. Its slices are valid until Planner.Step returns.
type Observation struct {
	At time.Duration // since any fixed moment
	// Since is how long it is since the observation before.
	Since                  time.Duration
	Prefill, Decode, Whole Pool
	Arrived                []Arrival
	Done                   []Done
	// Making are the tokens so far of each answer in progress, of those that wait for their first 0: what is known of lengths that are not
	// known yet. It may be empty where nobody counts them.
	Making       []int
	PrefillSteps []Step // a sample; of engines that do both too
	DecodeSteps  []Step
	// What went from prefill to decode engines.
	TransferTokens int64
	TransferTime   time.Duration
	// Started are times from the order to start an engine until it was ready.
	Started []time.Duration
}

// Now are the engines that are ready or starting.
func (o *Observation) Now() Pools {
	return Pools{Prefill: o.Prefill.Ready + o.Prefill.Starting, Decode: o.Decode.Ready + o.Decode.Starting, Whole: o.Whole.Ready + o.Whole.Starting}
}

// Changing tells whether engines are starting or draining.
func (o *Observation) Changing() bool {
	for _, p := range []*Pool{&o.Prefill, &o.Decode, &o.Whole} {
		if p.Starting > 0 || p.Draining > 0 {
			return true
		}
	}
	return false
}

// gpus counts all that are taken, those of engines that drain too.
func (o *Observation) gpus(each Pools) int {
	drain := Pools{Prefill: o.Prefill.Draining, Decode: o.Decode.Draining, Whole: o.Whole.Draining}
	return o.Now().Times(each) + drain.Times(each)
}

// Figure is a number that a decision was made by.
type Figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// Decision is what a planner wants.
type Decision struct {
	Want    Pools    `json:"want"`
	Reason  string   `json:"reason"`
	Figures []Figure `json:"figures,omitempty"`
}

// Planner says which pools there should be. It is used by one goroutine.
type Planner interface {
	// Name is what chooses it on a command line.
	Name() string
	// Step takes the next observation. A decision that wants what there is, or the zero one, changes nothing.
	Step(o *Observation) Decision
	// State is everything that the next decision depends on beside its observation, as JSON; Restore takes it again.
	State() ([]byte, error)
	Restore(state []byte) error
}

// Act is a change that was decided.
type Act struct {
	At      time.Duration `json:"at_ns"`
	Planner string        `json:"planner"`
	Had     Pools         `json:"had"`
	Decision
}

// Loop lets a planner act within its limits: never two changes at a time, never past the budget.
type Loop struct {
	Planner Planner
	Limits  Limits
	// Fits says which of the pools wanted can be placed, and why not all; nil is that all can.
	Fits func(want Pools) (Pools, string)
	// Watch is told of each observation, what the planner said to it, and what is done, if anything; nil is nobody.
	Watch func(o *Observation, d *Decision, act *Act)
}

// Step shows the planner an observation and returns what to do, if anything.
func (l *Loop) Step(o *Observation) (Act, bool) {
	d := l.Planner.Step(o)
	act, acts := l.act(o, d)
	switch {
	case l.Watch == nil:
	case acts:
		l.Watch(o, &d, &act)
	default:
		l.Watch(o, &d, nil)
	}
	return act, acts
}

func (l *Loop) act(o *Observation, d Decision) (Act, bool) {
	had := o.Now()
	if d.Want == (Pools{}) { // it has nothing to say
		d.Want = had
	}
	want := l.Limits.Raise(d.Want, had)
	if o.Changing() || d.Want == had && want == had {
		return Act{}, false
	}
	if want != d.Want {
		d.Reason = joined(d.Reason, fmt.Sprintf("raised from %s to at least %d GPUs", d.Want, l.Limits.MinGPUs))
		d.Want = want
	}
	if want = l.Limits.Cut(want); want != d.Want {
		d.Reason = joined(d.Reason, fmt.Sprintf("cut from %s to the budget of %d GPUs", d.Want, l.Limits.MaxGPUs))
	}
	if l.Fits != nil {
		placed, why := l.Fits(want)
		if placed != want {
			d.Reason += fmt.Sprintf("; of %s only %s can be placed: %s", want, placed, why)
		}
		want = placed
	}
	if want == had || grows(had, want) && o.gpus(l.Limits.EngineGPUs)+started(had, want).Times(l.Limits.EngineGPUs) > l.Limits.MaxGPUs {
		// What leaves has its GPUs until it has drained: first it goes, then the rest comes with the next decision.
		want = Pools{Prefill: min(had.Prefill, want.Prefill), Decode: min(had.Decode, want.Decode), Whole: min(had.Whole, want.Whole)}
		if want == had {
			return Act{}, false
		}
		d.Reason += "; what leaves goes first"
	}
	if d.Want = want; want.Times(l.Limits.EngineGPUs) < l.Limits.MinGPUs && want.Times(l.Limits.EngineGPUs) < had.Times(l.Limits.EngineGPUs) {
		return Act{}, false
	}
	return Act{At: o.At, Planner: l.Planner.Name(), Had: had, Decision: d}, true
}

func joined(reason, more string) string {
	if reason == "" {
		return more
	}
	return reason + "; " + more
}

func started(had, want Pools) Pools {
	return Pools{Prefill: max(0, want.Prefill-had.Prefill), Decode: max(0, want.Decode-had.Decode), Whole: max(0, want.Whole-had.Whole)}
}

func grows(had, want Pools) bool { return started(had, want) != Pools{} }

// Names are the planners that New makes.
func Names() []string { return []string{"predictive", "static", "reactive", "queue", "sla"} }

// Config is what planners are made with. Each has parameters of its own beside.
type Config struct {
	Limits Limits
	// Goal is what answers must keep to.
	TTFT, ITL time.Duration
	// Profile of the engines, for those that look into one.
	Profile *Profile
}

func (c *Config) surfaces() (*Surfaces, error) {
	if c.Profile == nil {
		return nil, errors.New("it needs a profile of the engines; measure one with headrace profile")
	}
	return NewSurfaces(*c.Profile)
}

// New makes a planner by its name and parameters: NAME or NAME:KEY=VALUE:KEY=VALUE.
func New(spec string, c Config) (Planner, error) {
	name, rest, _ := strings.Cut(spec, ":")
	p, err := parseParams(rest)
	if err != nil {
		return nil, fmt.Errorf("planner %q: %w", spec, err)
	}
	var made Planner
	switch name {
	case "static":
		made = newStatic(c, p)
	case "reactive":
		made = newReactive(c, p)
	case "queue":
		made = newQueue(c, p)
	case "sla":
		made, err = newSLA(c, p)
	case "predictive":
		made, err = newPredictive(c, p)
	default:
		return nil, fmt.Errorf("unknown planner %q; use %s", name, strings.Join(Names(), ", "))
	}
	if err := errors.Join(err, p.err()); err != nil {
		return nil, fmt.Errorf("planner %q: %w", spec, err)
	}
	return made, nil
}

// params are a planner's parameters. What is asked for is taken; what is left in the end was misspelt.
type params struct {
	given map[string]float64
	known []string
	bad   []string
}

func parseParams(text string) (*params, error) {
	p := &params{given: map[string]float64{}}
	if text == "" {
		return p, nil
	}
	for _, item := range strings.Split(text, ":") {
		key, value, ok := strings.Cut(item, "=")
		v, err := parseNumber(value)
		if !ok || key == "" || err != nil {
			return nil, fmt.Errorf("%q: use KEY=NUMBER", item)
		}
		if _, twice := p.given[key]; twice {
			return nil, fmt.Errorf("%s is given twice", key)
		}
		p.given[key] = v
	}
	return p, nil
}

// get takes a parameter that must be within bounds.
func (p *params) get(key string, fallback, low, high float64) float64 {
	p.known = append(p.known, key)
	v, ok := p.given[key]
	if !ok {
		return fallback
	}
	delete(p.given, key)
	if math.IsNaN(v) || v < low || v > high {
		p.bad = append(p.bad, fmt.Sprintf("%s %v must be %v to %v", key, v, low, high))
	}
	return v
}

func (p *params) err() error {
	for key := range p.given {
		slices.Sort(p.known)
		p.bad = append(p.bad, fmt.Sprintf("unknown parameter %q; there are %s", key, strings.Join(p.known, ", ")))
	}
	if len(p.bad) == 0 {
		return nil
	}
	slices.Sort(p.bad)
	return errors.New(p.bad[0])
}
