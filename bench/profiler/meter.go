package profiler

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/headrace/headrace/scheduler/profile"
)

const (
	// warmAtOnce are prompts that are put into the cache beside each other.
	warmAtOnce = 4
	// leadTries is how often streams are given more tokens until all of them run at once.
	leadTries = 5
	// Tokens are seen as they arrive, several together where an engine is faster than this program is scheduled: more of them are timed where a
	// window lasts shorter than the first, and none that lasts shorter than the second.
	lastsLeast = 50 * time.Millisecond
	lastsAtAll = 5 * time.Millisecond
)

// lead is how many tokens the first of n streams may have before the last one has begun.
func lead(n int) int { return 8 + n/4 }

// meter measures one engine. What it sends is new to the engine in every run.
type meter struct {
	c      *client
	setup  *Setup
	engine *profile.Engine
	nonce  uint64
	warmed map[int]int // prompts that were cached, by context
	count  uint64      // of prompts that are used once
}

func newMeter(c *client, setup *Setup, e *profile.Engine) *meter {
	return &meter{c: c, setup: setup, engine: e, nonce: rand.Uint64(), warmed: map[int]int{}}
}

// fresh is a prompt that nothing was like.
func (m *meter) fresh(tokens int) []byte {
	m.count++
	return prompt(tokens, m.nonce, 1, m.count)
}

// warm has the engine compute prompts of the shortest and the longest kind once, and finds out whether it takes token ids at all.
func (m *meter) warm(ctx context.Context) error {
	limit := m.engine.KVTokens
	if c := int64(m.engine.ContextTokens); c > 0 {
		limit = min(limit, c)
	}
	for _, n := range []int{m.setup.Prompts[0], m.setup.Prompts[len(m.setup.Prompts)-1]} {
		n = int(min(int64(n), limit-4))
		if n < 1 {
			continue
		}
		t, err := m.c.generate(ctx, m.fresh(n), 2, nil)
		if refused := (*errRefused)(nil); errors.As(err, &refused) {
			return fmt.Errorf("it refuses a prompt of %d token ids at /v1/completions: %w", n, err)
		}
		if err != nil {
			return err
		}
		if t.usage && t.prompt != n {
			return fmt.Errorf("it counts %d tokens in a prompt of %d token ids", t.prompt, n)
		}
	}
	return nil
}

// point measures p. What the engine refuses alone is noted in it and is no error.
func (m *meter) point(ctx context.Context, p *profile.Point) error {
	measure := m.decode
	if p.Kind == profile.Prefill {
		measure = m.prefill
	}
	var rounds []float64
	for range m.setup.Rounds {
		ms, err := measure(ctx, p)
		if refused := (*errRefused)(nil); errors.As(err, &refused) && refused.code >= 400 && refused.code < 500 && refused.code != http.StatusTooManyRequests {
			p.Why = err.Error()
		} else if errors.Is(err, errUnfit) {
			p.Why = err.Error()
		} else if err != nil {
			return err
		}
		if p.Why != "" {
			return nil
		}
		rounds = append(rounds, ms)
	}
	slices.Sort(rounds)
	n := len(rounds)
	p.Ms, p.Low, p.High, p.Rounds = (rounds[(n-1)/2]+rounds[n/2])/2, rounds[0], rounds[n-1], n
	return nil
}

// errUnfit marks what was measured and is not what was meant.
var errUnfit = errors.New("not measured")

// prefill is the time to the first token of a prompt, of which a part was computed before.
func (m *meter) prefill(ctx context.Context, p *profile.Point) (ms float64, err error) {
	ids := m.fresh(p.Prompt)
	if p.Cached > 0 {
		if _, err := m.c.generate(ctx, first(ids, p.Cached), 1, nil); err != nil {
			return 0, err
		}
	}
	began := time.Now()
	var took time.Duration
	t, err := m.c.generate(ctx, ids, 1, func(_ int, at time.Time) bool {
		if took == 0 {
			took = at.Sub(began)
		}
		return true
	})
	if err != nil {
		return 0, err
	}
	if off := t.cached - p.Cached; t.cached >= 0 && (off > m.engine.BlockTokens || -off > m.engine.BlockTokens) {
		return 0, fmt.Errorf("%w: the engine found %d tokens cached, and should have found %d; does it cache prefixes?", errUnfit, t.cached, p.Cached)
	}
	return took.Seconds() * 1e3, nil
}

// decode is the time between tokens while all streams run.
func (m *meter) decode(ctx context.Context, p *profile.Point) (ms float64, err error) {
	tokens := max(p.Context-m.setup.Tokens/2, 1)
	prompts := make([][]byte, p.Streams)
	for i := range prompts {
		prompts[i] = prompt(tokens, m.nonce, 2, uint64(p.Context), uint64(i))
	}
	if from := m.warmed[p.Context]; from < len(prompts) {
		if err := m.cache(ctx, prompts[from:]); err != nil {
			return 0, err
		}
		clear(m.warmed) // other contexts' had to give way
		m.warmed[p.Context] = len(prompts)
	}
	room := int(m.engine.KVTokens)
	if c := m.engine.ContextTokens; c > 0 {
		room = min(room, c)
	}
	ahead, want := lead(p.Streams), m.setup.Tokens
	fits := func(want int) bool {
		return ahead+want < room-tokens && int64(p.Streams)*int64(tokens+want+p.Streams/8) < m.engine.KVTokens
	}
	for try := 1; ; {
		w := newWindow(p.Streams, want)
		err := w.run(ctx, m.c, prompts, min(ahead+want, room-tokens-1))
		if err == nil {
			var lasted time.Duration
			ms, lasted = w.result(p, tokens)
			switch {
			case lasted < lastsLeast && fits(2*want):
				want *= 2
				continue
			case lasted < lastsAtAll:
				return 0, fmt.Errorf("%w: %d tokens of each stream came within %s, too fast to be timed from outside; give more --timed-tokens", errUnfit, want, lasted)
			}
			return ms, nil
		}
		if !errors.Is(err, errLead) {
			return 0, err
		}
		if try == leadTries || ahead+want >= room-tokens-1 {
			return 0, fmt.Errorf("%w: %d streams never ran at once for %d tokens each: the engine takes fewer (--streams), or has answered the first before the last arrive", errUnfit, p.Streams, want)
		}
		try++
		ahead *= 2
	}
}

// cache has the engine compute prompts, a few at a time.
func (m *meter) cache(ctx context.Context, prompts [][]byte) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan []byte)
	var working sync.WaitGroup
	for range min(warmAtOnce, len(prompts)) {
		working.Go(func() {
			for ids := range next {
				if _, err := m.c.generate(ctx, ids, 1, nil); err != nil {
					cancel(err)
				}
			}
		})
	}
	for _, ids := range prompts {
		if ctx.Err() != nil {
			break
		}
		next <- ids
	}
	close(next)
	working.Wait()
	return context.Cause(ctx)
}

// errLead says that the first streams were at their end before the last one had begun.
var errLead = errors.New("streams did not run at once")

// window is the time in which all of some streams run.
type window struct {
	want int // tokens of each

	mu      sync.Mutex // guards what follows
	streams []stream
	begun   int
	enough  int
	over    context.CancelFunc
}

// stream is what came of one.
type stream struct {
	at     []time.Time
	tokens []int // so far, at each of these times
	base   int   // index of the last event before all ran
	enough bool
}

func newWindow(streams, want int) *window {
	return &window{want: want, streams: make([]stream, streams)}
}

// run returns nil when there is a window.
func (w *window) run(ctx context.Context, c *client, prompts [][]byte, most int) error {
	within, cancel := context.WithCancel(ctx)
	defer cancel()
	w.over = cancel
	errs := make([]error, len(prompts))
	var running sync.WaitGroup
	for i, ids := range prompts {
		running.Go(func() {
			_, err := c.generate(within, ids, most, func(tokens int, at time.Time) bool { return w.seen(i, tokens, at) })
			if err = w.ended(i, err); err != nil {
				errs[i] = err
				cancel()
			}
		})
	}
	running.Wait()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case w.enough == len(prompts):
		return nil
	}
	for _, err := range errs {
		if err != nil && !errors.Is(err, context.Canceled) {
			return err
		}
	}
	return errLead
}

// seen notes tokens; false when they are enough.
func (w *window) seen(i, tokens int, at time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := &w.streams[i]
	s.at, s.tokens = append(s.at, at), append(s.tokens, tokens)
	if len(s.at) == 1 {
		if w.begun++; w.begun == len(w.streams) {
			for k := range w.streams {
				w.streams[k].base = len(w.streams[k].at) - 1
			}
		}
	}
	if w.begun == len(w.streams) {
		w.check(s)
	}
	return w.enough < len(w.streams)
}

func (w *window) check(s *stream) {
	if !s.enough && s.tokens[len(s.tokens)-1]-s.tokens[s.base] >= w.want {
		s.enough = true
		if w.enough++; w.enough == len(w.streams) {
			w.over()
		}
	}
}

// ended sees a stream's end: too early, its error is why.
func (w *window) ended(i int, err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.enough == len(w.streams), w.streams[i].enough:
		return nil
	case err != nil:
		return err
	}
	return errLead
}

// result notes in p the context that streams had on average and the tokens of each that were timed. It returns the mean of their times between
// tokens, and the shortest time in which one was timed.
func (w *window) result(p *profile.Point, prompt int) (ms float64, lasted time.Duration) {
	p.Mean, p.Tokens = 0, 0
	for k := range w.streams {
		s := &w.streams[k]
		last := len(s.at) - 1
		n, took := s.tokens[last]-s.tokens[s.base], s.at[last].Sub(s.at[s.base])
		if k == 0 || took < lasted {
			lasted = took
		}
		ms += took.Seconds() * 1e3 / float64(n)
		p.Mean += float64(prompt) + float64(s.tokens[s.base]+s.tokens[last]-1)/2
		p.Tokens += n
	}
	n := float64(len(w.streams))
	p.Mean /= n
	p.Tokens /= len(w.streams)
	return ms / n, lasted
}
