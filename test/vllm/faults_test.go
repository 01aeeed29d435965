package vllm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/test/vllm/stage"
)

// goneLimit is how long anything may stay pinned once its client has gone.
const goneLimit = time.Second

// rightOrError tells whether an answer is right, or is a clear error behind a right beginning.
func rightOrError(a, want *stage.Answer) error {
	if a.Err == nil {
		_, err := a.Differs(want)
		return err
	}
	if len(a.Tokens) > len(want.Tokens) || !slices.Equal(a.Tokens, want.Tokens[:len(a.Tokens)]) {
		return fmt.Errorf("%d tokens before the error %w are not the beginning of the right answer", len(a.Tokens), a.Err)
	}
	return nil
}

// aborts hangs up at random moments, several requests at a time: three of four by the clock, and one behind one of its tokens,
// for on a slow machine the clock alone finds none that streams.
func aborts(t *testing.T, s *scene, n int) {
	s.right(t, 19999, "before any abort") // an engine's first step takes longer than what is asked of it here
	r := rand.New(rand.NewPCG(3, 4))
	early, streaming, whole := 0, 0, 0
	var slowest time.Duration
	for round := 0; round*4 < n; round++ {
		var wg sync.WaitGroup
		var mu sync.Mutex
		for i := range 4 {
			request := stage.Request{Model: s.model, Prompt: stage.Prompt(20000+4*round+i, 40+r.IntN(1600)), MaxTokens: 60, Stream: true}
			delay, tokens := time.Duration(r.IntN(500))*time.Millisecond, request.MaxTokens+1
			if i == 3 {
				delay, tokens = time.Minute, 1+r.IntN(40)
			}
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(s.ctx, delay)
				defer cancel()
				a := stage.AskWith(ctx, s.URL(), request, func(a *stage.Answer) {
					if len(a.Tokens) >= tokens {
						cancel()
					}
				})
				mu.Lock()
				defer mu.Unlock()
				switch {
				case a.Err == nil:
					whole++
				case len(a.Tokens) > 0:
					streaming++
				default:
					early++
				}
			})
		}
		wg.Wait()
		slowest = max(slowest, s.idle(t, goneLimit, fmt.Sprintf("after the aborts of round %d", round)))
		if t.Failed() {
			return
		}
	}
	t.Logf("%d aborts before the first token, %d in the stream (%d had ended before); all blocks back within %.2f s of the last one", early, streaming, whole, slowest.Seconds())
	if early == 0 || streaming == 0 {
		t.Errorf("%d aborts before the first token and %d behind it, want some of both", early, streaming)
	}
	s.right(t, 29999, "after the aborts")
}

// stop holds the processes of an engine until the function it returns is called.
func (s *scene) stop(t *testing.T, role string) (resume func()) {
	t.Helper()
	pids, err := s.EnginePIDs(role)
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	resume = sync.OnceFunc(func() {
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGCONT) // may have been killed since
		}
	})
	t.Cleanup(resume)
	return resume
}

// clientGone: the client leaves between prefill's end and decode's beginning.
func clientGone(t *testing.T, s *scene, limit time.Duration) {
	prefill, err := s.Engine(registry.RolePrefill)
	if err != nil {
		t.Fatal(err)
	}
	done := "vllm:request_success_total"
	before, err := prefill.Metrics(s.ctx)
	if err != nil {
		t.Fatal(err)
	}
	resume := s.stop(t, registry.RoleDecode)
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	answered := make(chan *stage.Answer, 1)
	go func() {
		answered <- stage.Ask(ctx, s.URL(), stage.Request{Model: s.model, Prompt: stage.Prompt(30001, 700), MaxTokens: 20, Stream: true})
	}()
	if err := stage.Poll(s.ctx, 10*time.Second, func() error {
		m, err := prefill.Metrics(s.ctx)
		if err == nil && m[done] == before[done] {
			err = errors.New("prefill has not ended")
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-answered
	gone := time.Now()
	err = stage.Poll(s.ctx, limit, func() error { return prefill.Idle(s.ctx) })
	took := time.Since(gone)
	if err != nil {
		t.Errorf("the client has gone, decode stands still: %v; leases: %v", err, s.Leases(s.ctx))
	} else {
		t.Logf("prefill's blocks are free %.2f s after the client has gone", took.Seconds())
	}
	resume()
	s.listed(t)
	s.idle(t, 5*time.Second, "when decode goes on")
	s.right(t, 30002, "after a client that left")
}

// late: decode stands still until the ticket or lease is over and prefill's blocks have been used again.
func late(t *testing.T, s *scene, still time.Duration) {
	prefill, err := s.Engine(registry.RolePrefill)
	if err != nil {
		t.Fatal(err)
	}
	r := stage.Request{Model: s.model, Prompt: stage.Prompt(31001, 700), MaxTokens: 20, Stream: true}
	want := s.want(t, r)
	again := r
	again.Prompt = append(slices.Clone(r.Prompt), stage.Prompt(31002, 10)...)
	wantAgain := s.want(t, again)
	resume := s.stop(t, registry.RoleDecode)
	answered := make(chan *stage.Answer, 1)
	go func() { answered <- s.ask(r) }()
	begun := time.Now()
	var early *stage.Answer
	for i := 0; time.Since(begun) < still; i++ { // prefill's blocks go round
		if a := stage.Ask(s.ctx, prefill.URL(), stage.Request{Model: s.model, Prompt: stage.Prompt(32000+i, 1900), MaxTokens: 1}); a.Err != nil {
			t.Fatalf("ask prefill for something else: %v", a.Err)
		}
		select {
		case early = <-answered:
			answered <- early
		default:
		}
	}
	resume()
	a := <-answered
	s.listed(t)
	if err := rightOrError(a, want); err != nil {
		t.Errorf("the late request: %v", err)
	}
	t.Logf("decode stood still for %.0f s: the client had its answer after %.1f s (while it stood: %v; error: %v)", still.Seconds(), a.Took.Seconds(), early != nil, a.Err)
	// What came late must not have been kept either.
	decode, err := s.Engine(registry.RoleDecode)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stage.Ask(s.ctx, decode.URL(), again).Differs(wantAgain); err != nil {
		t.Errorf("a plain request to decode with the same beginning: %v", err)
	}
	if _, err := s.ask(again).Differs(wantAgain); err != nil {
		t.Errorf("a request through the router with the same beginning: %v", err)
	}
	s.idle(t, 5*time.Second, "after a late request")
}

// listed waits until a part that stood still is taken for well again.
func (s *scene) listed(t *testing.T) {
	t.Helper()
	if err := s.Whole(s.ctx, time.Minute); err != nil {
		t.Fatal(err)
	}
}

// victim is somebody to kill.
type victim struct {
	name  string
	alive string // the role whose engine lives on, "" for both
	pids  func(s *scene, round int) ([]int, error)
}

func engineVictim(name, role, other string) victim {
	return victim{name, other, func(s *scene, round int) ([]int, error) {
		pids, err := s.EnginePIDs(role)
		if err == nil && round%2 == 1 && len(pids) > 1 {
			pids = pids[len(pids)-1:] // the engine's core alone: its server finds out by itself
		}
		return pids, err
	}}
}

var (
	prefillVictim = engineVictim("prefill", registry.RolePrefill, registry.RoleDecode)
	decodeVictim  = engineVictim("decode", registry.RoleDecode, registry.RolePrefill)
	daemonVictim  = victim{"a daemon", "", func(s *scene, round int) ([]int, error) {
		n, err := s.Node([]string{registry.RolePrefill, registry.RoleDecode}[round%2])
		return []int{n.PID}, err
	}}
)

// kills ends a part with kill -9 while requests are under way in all phases.
func kills(t *testing.T, s *scene, v victim, rounds int, limit time.Duration) {
	for round := range rounds {
		// What was killed before may have the router leave the other engine alone for a while: two that fail at once are more than it is asked to bear here.
		if err := s.Whole(s.ctx, time.Minute); err != nil {
			t.Fatal(err)
		}
		pids, err := v.pids(s, round)
		if err != nil {
			t.Fatal(err)
		}
		seed := 40000 + 100*round + 1000*len(v.name)
		var rs []stage.Request
		for i, n := range []int{60, 400, 1500} {
			rs = append(rs, stage.Request{Model: s.model, Prompt: stage.Prompt(seed+i, n), MaxTokens: 150, Stream: true})
		}
		// A chat goes on as a completion, and one with log probabilities is told again.
		chat := fmt.Sprintf("Go on, %d: ", seed) + strings.Repeat("the mill race brings water from the weir to the wheel. ", 12)
		rs = append(rs, stage.Request{Model: s.model, Chat: chat, MaxTokens: 150, Stream: true, More: map[string]any{"logprobs": nil, "top_logprobs": nil}},
			stage.Request{Model: s.model, Chat: "And " + chat, MaxTokens: 100, Stream: true})
		wants := s.wants(t, rs)
		answers := make([]*stage.Answer, len(rs))
		var wg sync.WaitGroup
		first := make(chan struct{}, 1)
		begun := []int{25, 1}[round%2] // tokens of the one that is ahead: the others are in all phases
		for i, r := range rs {
			wg.Go(func() {
				answers[i] = stage.AskWith(s.ctx, s.URL(), r, func(a *stage.Answer) {
					if len(a.Tokens) < begun {
						return
					}
					select {
					case first <- struct{}{}:
					default:
					}
				})
			})
		}
		<-first
		killed := time.Now()
		for _, pid := range pids {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Logf("kill %d: %v", pid, err)
			}
		}
		wg.Wait()
		for i, a := range answers { // whoever died, somebody could go on
			if _, err := a.Differs(wants[i]); err != nil {
				t.Errorf("kill -9 of %s, round %d, request %d, behind %d tokens: %v", v.name, round, i, len(a.Tokens), err)
			}
		}
		ended := time.Since(killed)
		if v.alive == "" { // both engines live: what is lost is computed again
			alone := time.Duration(0)
			for _, want := range wants {
				alone += want.Took
			}
			if ended > alone+stallLimit {
				t.Errorf("kill -9 of %s, round %d: the last answer came %.1f s behind it, the aggregated engine computes all in %.1f s", v.name, round, ended.Seconds(), alone.Seconds())
			}
		}
		if v.alive != "" {
			other, err := s.Engine(v.alive)
			if err != nil {
				t.Fatal(err)
			}
			if err := stage.Poll(s.ctx, limit, func() error { return other.Idle(s.ctx) }); err != nil {
				t.Errorf("kill -9 of %s, round %d: the other engine: %v", v.name, round, err)
			}
		}
		if err := s.Whole(s.ctx, 3*time.Minute); err != nil {
			t.Fatal(err)
		}
		whole := time.Since(killed)
		s.idle(t, max(5*time.Second, limit), "after kill -9 of "+v.name)
		s.right(t, seed+50, "after kill -9 of "+v.name)
		t.Logf("kill -9 of %s, round %d: %d streams are whole and right, moved: %s; the last ended %.1f s behind the kill; whole again after %.0f s",
			v.name, round, len(rs), s.migrations(t), ended.Seconds(), whole.Seconds())
		if t.Failed() {
			return
		}
	}
}

// migrations is how many streams the router has moved so far, in its own words.
func (s *scene) migrations(t *testing.T) string {
	t.Helper()
	resp, err := http.Get(strings.TrimSuffix(s.URL(), "/v1") + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var all []string
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "headrace_router_migrations_total"); ok {
			all = append(all, rest)
		}
	}
	if all == nil {
		return "none"
	}
	return strings.Join(all, ", ")
}

// stallLimit is what a request may take longer than its computing when a daemon is killed: much less than the 30 s that decode
// would wait for a prefill that never comes, and more than a busy machine adds.
const stallLimit = 10 * time.Second

// hits kills a daemon and sends a request at once, or the other way round: decode is not to wait for KV that was lost with it.
func hits(t *testing.T, s *scene, rounds int) {
	var alone, slowest time.Duration
	s.right(t, 70999, "before any kill") // what begins with the first request is no stall
	for round := range rounds {
		role := []string{registry.RoleDecode, registry.RolePrefill}[round%2]
		delay := time.Duration([]int{0, 0, 20, 60, 150}[round%5]) * time.Millisecond
		r := stage.Request{Model: s.model, Prompt: stage.Prompt(70000+round, 900), MaxTokens: 4, Stream: true}
		want := s.want(t, r)
		alone = max(alone, want.Took)
		node, err := s.Node(role)
		if err != nil {
			t.Fatal(err)
		}
		answered := make(chan *stage.Answer, 1)
		ask := func() { answered <- s.ask(r) }
		if delay > 0 {
			go ask()
			select { // it is to be under way: whatever it has come to is a case
			case <-time.After(delay):
			case <-s.ctx.Done():
			}
		}
		if err := syscall.Kill(node.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if delay == 0 {
			go ask()
		}
		a := <-answered
		if err := rightOrError(a, want); err != nil {
			t.Errorf("kill -9 of the daemon of %s, %s behind the request: %v", role, delay, err)
		}
		t.Logf("kill -9 of the daemon of %s, %s behind the request: first token after %.2f s, answer after %.2f s (alone %.2f s), error: %v",
			role, delay, a.First.Seconds(), a.Took.Seconds(), want.Took.Seconds(), a.Err)
		if slowest = max(slowest, a.Took); a.Took > 2*want.Took+stallLimit {
			t.Errorf("kill -9 of the daemon of %s: the answer took %.1f s, the aggregated engine's %.1f s", role, a.Took.Seconds(), want.Took.Seconds())
		}
		if err := stage.Poll(s.ctx, time.Minute, func() error { // the answer may be here before anybody has noticed
			next, err := s.Node(role)
			if err != nil {
				return err
			}
			w, err := s.Worker(role)
			if err == nil && (next.PID == node.PID || w.NodeData != next.DataAddr) {
				err = fmt.Errorf("the daemon of %s is %d at %s, %d was killed; the engine has the one at %s", role, next.PID, next.DataAddr, node.PID, w.NodeData)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if err := s.Whole(s.ctx, 3*time.Minute); err != nil {
			t.Fatal(err)
		}
		s.right(t, 71000+round, "after kill -9 of a daemon")
		if t.Failed() {
			return
		}
	}
	t.Logf("%d requests at a daemon's kill -9: answered after %.2f s at most; alone %.2f s at most", rounds, slowest.Seconds(), alone.Seconds())
}
