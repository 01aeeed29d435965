package vllm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/test/vllm/stage"
)

// full runs the counts of the proof; otherwise a tenth of them.
var full = os.Getenv("HEADRACE_FULL") == "1"

// count is how often something is done, at full length and otherwise.
func count(whole, short int) int {
	if full {
		return whole
	}
	return short
}

// environment skips where there is no vLLM, by the name of what is missing.
func environment(t *testing.T) stage.Env {
	t.Helper()
	env, err := stage.Find()
	if errors.Is(err, stage.ErrNone) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return env
}

// scene is a cluster and, beside it, the aggregated vLLM of the same configuration that says what is right.
type scene struct {
	ctx   context.Context
	model string
	stage *stage.Stage
	*stage.Cluster
	whole *stage.Engine

	mu    sync.Mutex
	known map[string]*stage.Answer
}

// setUp starts both at once.
func setUp(t *testing.T, c stage.UpConfig) *scene {
	t.Helper()
	s := &scene{ctx: t.Context(), model: c.Model, known: map[string]*stage.Answer{}}
	var err error
	if s.stage, err = stage.New(environment(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && s.Cluster != nil {
			t.Log(s.Said())
		}
		if s.Cluster != nil {
			s.Cluster.Close()
		}
		if err := s.stage.Close(); err != nil {
			t.Error(err)
		}
	})
	if s.Cluster, err = s.stage.Up(c); err != nil {
		t.Fatal(err)
	}
	if s.whole, err = s.stage.Plain(c.Config); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	if err := errors.Join(s.Ready(s.ctx), s.whole.Ready(s.ctx)); err != nil {
		t.Fatal(err)
	}
	t.Logf("two engines behind a router and one alone are up after %.0f s", time.Since(begun).Seconds())
	return s
}

// want is the aggregated engine's answer, asked for when nothing else runs there.
func (s *scene) want(t *testing.T, r stage.Request) *stage.Answer {
	t.Helper()
	r.Stream = false
	key := fmt.Sprintf("%+v", r)
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.known[key]; a != nil {
		return a
	}
	a := stage.Ask(s.ctx, s.whole.URL(), r)
	if a.Err != nil {
		t.Fatalf("ask the aggregated engine: %v", a.Err)
	}
	s.known[key] = a
	return a
}

// ask sends a request through the router.
func (s *scene) ask(r stage.Request) *stage.Answer { return stage.Ask(s.ctx, s.URL(), r) }

// atOnce answers all requests, at most width of them at a time.
func atOnce(ctx context.Context, base string, width int, rs []stage.Request) []*stage.Answer {
	out := make([]*stage.Answer, len(rs))
	next := make(chan int, len(rs))
	for i := range rs {
		next <- i
	}
	close(next)
	var wg sync.WaitGroup
	for range width {
		wg.Go(func() {
			for i := range next {
				out[i] = stage.Ask(ctx, base, rs[i])
			}
		})
	}
	wg.Wait()
	return out
}

// compare fails for each answer with another token, and returns the largest difference of a logprob.
func compare(t *testing.T, what string, got, want []*stage.Answer) float64 {
	t.Helper()
	largest := 0.0
	for i := range got {
		d, err := got[i].Differs(want[i])
		if err != nil {
			t.Errorf("%s, prompt %d: %v", what, i, err)
		}
		largest = max(largest, d)
	}
	return largest
}

// idle fails the test when something is still held after the limit. It returns how long it took.
func (s *scene) idle(t *testing.T, limit time.Duration, when string) time.Duration {
	t.Helper()
	begun := time.Now()
	if err := stage.Poll(s.ctx, limit, func() error { return s.Idle(s.ctx) }); err != nil {
		t.Errorf("%s, something is still held: %v", when, err)
	}
	return time.Since(begun)
}

// right sends a fresh request and demands the aggregated engine's answer and that KV moved for it.
func (s *scene) right(t *testing.T, seed int, when string) {
	t.Helper()
	r := stage.Request{Model: s.model, Prompt: stage.Prompt(seed, 300), MaxTokens: 12}
	want := s.want(t, r)
	before, err := s.Moved(s.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.ask(r).Differs(want); err != nil {
		t.Errorf("the next request %s: %v", when, err)
	}
	// An engine counts when it steps, which may be after the answer.
	if err := stage.Poll(s.ctx, 2*time.Second, func() error {
		after, err := s.Moved(s.ctx)
		if err == nil && after == before {
			err = errors.New("nothing moved")
		}
		return err
	}); err != nil {
		t.Errorf("the next request %s was not disaggregated: %v", when, err)
	}
}
