// Package profiler measures inference engines: it starts them at each degree of parallelism or finds one that runs, times prompts and
// streams, and remembers every point. What the figures mean is scheduler/profile's to say. It must not know what an engine is beyond its
// HTTP server.
package profiler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/headrace/headrace/scheduler/profile"
)

// Running is an engine that answers.
type Running struct {
	Engine profile.Engine // what it says of itself; 0 where it says nothing
	URL    string         // http://host:port
	// Died is closed, and Err is then set, when the engine is no more; nil when nobody would notice.
	Died <-chan struct{}
	Err  func() error
	Stop func() error
}

// Options of Run.
type Options struct {
	Setup   Setup
	Dir     string // where state and results are
	Restart bool
	Name    string
	Note    string
	Goals   profile.Goals
	Chunk   int
	// Of the channel between prefill and decode, as the table is to say it.
	TokenBytes float64
	ChannelBps float64
	// Start starts an engine of a degree, or finds it.
	Start func(ctx context.Context, degree int) (*Running, error)
	// HTTP speaks with engines; it must not limit connections.
	HTTP *http.Client
	// Progress is told of everything; nil for nobody.
	Progress Progress
	// Log is for what engines say; it may be nil.
	Log io.Writer
}

// Progress is told how far a sweep is, by one goroutine at a time.
type Progress interface {
	Engine(degree int)                     // it is being started
	Plan(degree, done, all int)            // points of an engine
	Point(p *profile.Point, done, all int) // it is measured
	Warn(text string)
}

// ErrPartial says that a sweep is not complete: what there is was kept and written.
var ErrPartial = errors.New("the profile is partial; the same command goes on from there")

// Run measures what is missing, and writes the results: also when it ends early, as far as they go. It returns what there is beside an error.
func Run(ctx context.Context, o Options) (r *profile.Report, err error) {
	if err := errors.Join(o.Goals.Check(), o.Setup.Check()); err != nil {
		return nil, err
	}
	st, err := openState(o.Dir, &o.Setup, o.Restart)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, st.close()) }()
	s := &sweep{o: &o, st: st}
	if o.Progress == nil {
		o.Progress = silent{}
	}
	var failed []error
	for _, degree := range o.Setup.Degrees {
		if err := s.degree(ctx, degree); err != nil {
			failed = append(failed, fmt.Errorf("degree %d: %w", degree, err))
			if ctx.Err() != nil {
				break
			}
			o.Progress.Warn(failed[len(failed)-1].Error())
		}
	}
	r, err = s.results(len(failed) > 0)
	if len(failed) > 0 {
		return r, errors.Join(append(failed, err, ErrPartial)...)
	}
	return r, err
}

// Check says what is wrong with a set-up, and puts it in order.
func (s *Setup) Check() error {
	for _, l := range []struct {
		name string
		list *[]int
		most int
	}{{"--tp", &s.Degrees, 1024}, {"--prompts", &s.Prompts, 1 << 26}, {"--contexts", &s.Context, 1 << 26}} {
		if len(*l.list) == 0 {
			return fmt.Errorf("%s is empty", l.name)
		}
		slices.Sort(*l.list)
		*l.list = slices.Compact(*l.list)
		if (*l.list)[0] < 1 || (*l.list)[len(*l.list)-1] > l.most {
			return fmt.Errorf("%s: numbers must be 1 to %d", l.name, l.most)
		}
	}
	for _, l := range []struct {
		name string
		list *[]float64
		most float64
	}{{"--cached", &s.Cached, 0.99}, {"--kv-usage", &s.Usages, 1}} {
		slices.Sort(*l.list)
		*l.list = slices.Compact(*l.list)
		for _, v := range *l.list {
			if !(v >= 0 && v <= l.most) {
				return fmt.Errorf("%s: shares must be 0 to %g", l.name, l.most)
			}
		}
	}
	switch {
	case !slices.Contains(s.Cached, 0):
		return errors.New("--cached must have 0 in it: surfaces are of prompts with nothing cached")
	case len(s.Usages) == 0:
		return errors.New("--kv-usage is empty")
	case s.Rounds < 1 || s.Rounds > 1000:
		return fmt.Errorf("--rounds %d: it must be 1 to 1000", s.Rounds)
	case s.Tokens < 4 || s.Tokens > 1<<16:
		return fmt.Errorf("--timed-tokens %d: it must be 4 to 65536", s.Tokens)
	case s.KV < 0 || s.Streams < 1:
		return errors.New("--kv-tokens cannot be negative, and --streams must be at least 1")
	}
	return nil
}

// diesWithin is how long after an error an engine's end may be seen.
const diesWithin = 2 * time.Second

// sweep is one run.
type sweep struct {
	o  *Options
	st *state
}

// degree measures one, as far as it is missing.
func (s *sweep) degree(ctx context.Context, degree int) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	if e := s.st.engine(degree); e != nil && e.Failed == "" && e.KVTokens > 0 {
		if plan := s.plan(e); s.missing(plan) == 0 {
			s.o.Progress.Plan(degree, len(plan), len(plan))
			return nil
		}
	}
	s.o.Progress.Engine(degree)
	running, err := s.o.Start(ctx, degree)
	if err != nil {
		return s.failed(degree, err)
	}
	defer func() { err = errors.Join(err, running.Stop()) }()
	e, err := s.facts(degree, running)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if running.Died != nil {
		ended := make(chan struct{})
		defer func() { <-ended }()
		stop := make(chan struct{})
		defer close(stop)
		go func() {
			defer close(ended)
			select {
			case <-running.Died:
				cancel(running.Err())
			case <-stop:
			}
		}()
	}
	if err := s.measure(ctx, e, running); err != nil {
		return s.failed(degree, why(ctx, running, err))
	}
	return nil
}

// why is what an engine died of, where that is what an error comes from: its connections break before its end is seen.
func why(ctx context.Context, running *Running, err error) error {
	if running.Died != nil && ctx.Err() == nil && !errors.As(err, new(*errRefused)) {
		timer := time.NewTimer(diesWithin)
		defer timer.Stop()
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
	}
	return cmp.Or(context.Cause(ctx), err)
}

// failed remembers why a degree has no more points. That somebody interrupted is no reason.
func (s *sweep) failed(degree int, why error) error {
	if errors.Is(why, context.Canceled) {
		return why
	}
	e := profile.Engine{Degree: degree, GPUs: degree}
	if was := s.st.engine(degree); was != nil {
		e = *was
	}
	e.Failed = why.Error()
	return errors.Join(why, s.st.addEngine(&e))
}

// facts completes what an engine says of itself, and sees that it is what it was in another run.
func (s *sweep) facts(degree int, running *Running) (*profile.Engine, error) {
	e := running.Engine
	e.Degree, e.GPUs, e.Streams = degree, cmp.Or(e.GPUs, degree), cmp.Or(e.Streams, s.o.Setup.Streams)
	if s.o.Setup.KV > 0 {
		e.KVTokens = s.o.Setup.KV
	}
	if e.KVTokens < 1 {
		return nil, errors.New("the engine does not say how many tokens its KV cache holds: give --kv-tokens")
	}
	if e.BlockTokens < 1 {
		e.BlockTokens = 16
	}
	if was := s.st.engine(degree); was != nil && was.KVTokens > 0 {
		if was.Model != e.Model || was.KVTokens != e.KVTokens || was.ContextTokens != e.ContextTokens {
			return nil, fmt.Errorf("the engine is not the one that was measured before: %q with %d KV tokens and a context of %d then, %q with %d and %d now; use --restart to begin anew, or another --out",
				was.Model, was.KVTokens, was.ContextTokens, e.Model, e.KVTokens, e.ContextTokens)
		}
		if e.StartMs == 0 {
			e.StartMs = was.StartMs
		}
	}
	return &e, s.st.addEngine(&e)
}

// plan are the points of an engine, in the order in which they are measured: streams grow within a context, so that the prompts of fewer are
// cached for more.
func (s *sweep) plan(e *profile.Engine) []profile.Point {
	var list []profile.Point
	limit := int64(cmp.Or(e.ContextTokens, math.MaxInt32))
	limit = min(limit, e.KVTokens)
	for _, n := range s.o.Setup.Prompts {
		if int64(n)+2 > limit {
			continue
		}
		for _, share := range s.o.Setup.Cached {
			cached := int(float64(n)*share) / e.BlockTokens * e.BlockTokens
			p := profile.Point{Degree: e.Degree, Kind: profile.Prefill, Prompt: n, Cached: cached}
			if cached < n && !slices.ContainsFunc(list, func(o profile.Point) bool { return o.Key() == p.Key() }) {
				list = append(list, p)
			}
		}
	}
	for _, c := range s.o.Setup.Context {
		for _, n := range s.streams(e, c, limit) {
			list = append(list, profile.Point{Degree: e.Degree, Kind: profile.Decode, Streams: n, Context: c})
		}
	}
	return list
}

// streams are how many are timed at a context: one, and as many as take the parts of the KV cache that were asked for, with room to grow.
func (s *sweep) streams(e *profile.Engine, context int, limit int64) []int {
	grown := int64(context + s.o.Setup.Tokens)
	if grown+int64(lead(1)) > limit {
		return nil
	}
	most := int(min(e.KVTokens/grown, int64(e.Streams)))
	list := []int{1}
	for _, u := range s.o.Setup.Usages {
		list = append(list, min(max(int(math.Round(u*float64(e.KVTokens)/float64(context))), 1), most))
	}
	slices.Sort(list)
	return slices.Compact(list)
}

func (s *sweep) missing(plan []profile.Point) int {
	n := 0
	for i := range plan {
		if !s.st.known[plan[i].Key()] {
			n++
		}
	}
	return n
}

// measure takes every point that is not known yet.
func (s *sweep) measure(ctx context.Context, e *profile.Engine, running *Running) error {
	plan := s.plan(e)
	prefills := 0
	for i := range plan {
		if plan[i].Kind == profile.Prefill && plan[i].Cached == 0 {
			prefills++
		}
	}
	if prefills < 2 || len(plan) == 0 || plan[len(plan)-1].Kind != profile.Decode {
		return fmt.Errorf("the engine takes %d tokens a request and holds %d: too few for two of --prompts and one of --contexts; give shorter ones", e.ContextTokens, e.KVTokens)
	}
	done := len(plan) - s.missing(plan)
	s.o.Progress.Plan(e.Degree, done, len(plan))
	m := newMeter(&client{http: s.o.HTTP, base: running.URL, model: e.Model}, &s.o.Setup, e)
	if err := m.warm(ctx); err != nil {
		return err
	}
	for i := range plan {
		p := &plan[i]
		if s.st.known[p.Key()] {
			continue
		}
		if err := m.point(ctx, p); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if err := s.st.addPoint(p); err != nil {
			return err
		}
		done++
		s.o.Progress.Point(p, done, len(plan))
	}
	return nil
}

type silent struct{}

func (silent) Engine(int)                     {}
func (silent) Plan(int, int, int)             {}
func (silent) Point(*profile.Point, int, int) {}
func (silent) Warn(string)                    {}
