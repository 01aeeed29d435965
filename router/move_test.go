package router

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/routertest"
)

// drainable is a fleet whose worker "1" has a stream when it begins to drain.
type drainable struct {
	t       *testing.T
	h       *harness
	begun   chan struct{}
	asked   chan struct{} // closed when the stream need not wait any more
	release func()
}

// movePlan is what a test wants of the workers of a drainable.
type movePlan struct {
	workers []*routertest.Worker // the first one that decodes gets the stream
	config  func(*Config)
	// fault is asked before the stream waits for its move.
	fault func(c *routertest.Call, stage string, n int) routertest.Action
	at    int // the token that it waits behind
}

// startDrainable holds the stream behind a token until it has been asked to move.
func startDrainable(t *testing.T, p movePlan) *drainable {
	t.Helper()
	d := &drainable{t: t, begun: make(chan struct{}), asked: make(chan struct{})}
	d.release = sync.OnceFunc(func() { close(d.asked) })
	first := p.workers[len(p.workers)-1]
	for _, w := range slices.Backward(p.workers) {
		if w.Role != pairing.RolePrefill {
			first = w
		}
	}
	begun := sync.OnceFunc(func() { close(d.begun) })
	for _, w := range p.workers {
		w.Fault = func(c *routertest.Call, stage string, n int) routertest.Action {
			if p.fault != nil {
				if a := p.fault(c, stage, n); a != routertest.Go {
					if stage == routertest.StageMove && a == routertest.Lose {
						d.release()
					}
					return a
				}
			}
			switch {
			case c.Worker != first:
			case stage == routertest.StageAsked:
				d.release()
			case stage == routertest.StageToken && n == p.at:
				begun()
				<-d.asked
			}
			return routertest.Go
		}
	}
	d.h = startParallel(t, func(c *Config) {
		unless(false)(c)
		if p.config != nil {
			p.config(c)
		}
	}, p.workers...)
	t.Cleanup(d.release) // a test that fails: the harness waits for the workers
	only := []*routertest.Worker{first}
	for _, w := range p.workers {
		if w.Role == pairing.RolePrefill {
			only = append(only, w)
		}
	}
	d.h.source.set(only...)
	d.h.until("the others to be gone", func() bool { return len(d.h.r.Status().Workers) == len(only) })
	return d
}

// drain makes all workers known, and these drain.
func (d *drainable) drain(ids ...string) {
	for _, w := range d.h.workers {
		w.Weight = nil
		if slices.Contains(ids, w.ID) {
			w.Weight = new(float64)
		}
	}
	d.h.source.set(d.h.workers...)
}

// ask sends the request, and drains the worker when it has the stream.
func (d *drainable) ask(q ask, ids ...string) *answer {
	d.t.Helper()
	answered := make(chan *answer, 1)
	go func() { answered <- d.h.do(q) }()
	select {
	case <-d.begun:
	case a := <-answered:
		d.t.Fatalf("the stream did not wait: %+v", a)
	case <-time.After(3 * patience):
		d.t.Fatal("no stream")
	}
	d.drain(ids...)
	select {
	case a := <-answered:
		return a
	case <-time.After(3 * patience):
		d.t.Fatalf("no answer: decisions %+v", d.h.r.decisions.list(""))
		return nil
	}
}

// results are the counted moves.
func (d *drainable) results() map[string]float64 {
	out := map[string]float64{}
	for _, r := range []dialects.MoveResult{dialects.MoveDone, dialects.MoveRefused, dialects.MoveFailed, dialects.MoveOutlived, dialects.MoveNotOffered, moveNotWorth, moveGivenUp} {
		if n := value(d.h.r.moves.results.WithLabelValues(string(r))); n > 0 {
			out[string(r)] = n
		}
	}
	return out
}

// wantResults checks them, and that the attempts were so many.
func (d *drainable) wantResults(attempts int, want ...string) {
	d.t.Helper()
	wants := map[string]float64{}
	for _, r := range want {
		wants[r]++
	}
	if got := d.results(); fmt.Sprint(got) != fmt.Sprint(wants) {
		d.t.Errorf("moves %v, want %v", got, wants)
	}
	if n := len(d.h.r.decisions.list("")); n != attempts {
		d.t.Errorf("%d attempts, want %d: %+v", n, attempts, d.h.r.decisions.list(""))
	}
}

// movable is long enough for a move to pay.
var movable = ask{n: 60, stream: true, usage: true}

// TestStreamsLeaveWorkersThatDrain: the client gets one answer, and the worker that drains has nothing left.
func TestStreamsLeaveWorkersThatDrain(t *testing.T) {
	for name, ids := range map[string][]string{"pair": {"p1", "d1", "d2"}, "whole": {"b1", "b2"}, "from both to decode": {"b1", "d2"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, at := range []int{1, 2, 3, 7, 8, 9} { // some are within a character
				for _, stream := range []bool{true, false} {
					d := startDrainable(t, movePlan{workers: both3(ids...), at: at})
					q := movable
					q.stream, q.usage = stream, stream
					d.ask(q, ids[len(ids)-2]).wantWhole(t, q)
					d.wantResults(1, "moved")
					from, to := d.h.workers[len(ids)-2], d.h.workers[len(ids)-1]
					calls := to.Last()
					if len(calls) != 1 || calls[0].KV.Role != "decode" || calls[0].KV.Resume == nil || len(*calls[0].KV.Resume) == 0 || from.Calls() != 1 {
						t.Errorf("%s got %d requests, %s %d: %s", from.ID, from.Calls(), to.ID, len(calls), calls[0].Body)
					}
					moves := d.h.r.decisions.list("")[0].Moves
					if len(moves) != 1 || moves[0].From != from.ID || moves[0].To != to.ID || moves[0].Result != "moved" {
						t.Errorf("the decision has moves %+v", moves)
					}
					d.h.until("the request to be kept", func() bool { return len(d.h.r.recent.list(1, func(*record) bool { return true })) == 1 })
					if a := d.h.r.recent.list(1, func(*record) bool { return true })[0].Attempts; len(a) != 1 || len(a[0].Moves) != 1 || a[0].Moves[0].To != to.ID {
						t.Errorf("the trace has %+v", a)
					}
				}
			}
		})
	}
}

// both3 makes workers: p prefills, d decodes, b does both.
func both3(ids ...string) []*routertest.Worker {
	ws := pair(ids...)
	for _, w := range ws {
		if w.ID[0] == 'b' {
			w.Role = pairing.RoleBoth
		}
	}
	return ws
}

// TestMovesThatComeToNothing: whatever goes wrong with a move, the stream goes on at its worker, or anew where that is gone.
func TestMovesThatComeToNothing(t *testing.T) {
	const source, heir = "d1", "d2"
	for _, c := range []struct {
		who, stage string
		action     routertest.Action
		attempts   int
		result     string // "" for either of two
	}{
		{heir, routertest.StageRequest, routertest.Busy, 1, "refused"},
		{heir, routertest.StageRequest, routertest.Err, 1, "refused"},
		{heir, routertest.StageRequest, routertest.Die, 1, "failed"},
		{heir, routertest.StageBound, routertest.Fail, 1, "failed"},
		{heir, routertest.StageBound, routertest.Die, 1, "failed"},
		{source, routertest.StageMove, routertest.Bad, 1, "refused"},
		{source, routertest.StageMove, routertest.Lose, 1, "outlived"},
		// The source dies: as ever.
		{source, routertest.StageHandoff, routertest.Die, 2, ""},
		{source, routertest.StageTransfer, routertest.Die, 2, ""},
		{source, routertest.StageTransfer, routertest.Fail, 2, ""},
		// The heir has the stream already, and dies with it.
		{heir, routertest.StageToken, routertest.Die, 2, "moved"},
		{heir, routertest.StageToken, routertest.Fail, 2, "moved"},
	} {
		t.Run(fmt.Sprintf("%s-%s-%d", c.who, c.stage, c.action), func(t *testing.T) {
			t.Parallel()
			var once routertest.Once
			var d *drainable
			d = startDrainable(t, movePlan{workers: both3("p1", "d1", "d2"), at: 3, fault: func(call *routertest.Call, stage string, _ int) routertest.Action {
				if call.Worker.ID == c.who && stage == c.stage && call.KV.Role == "decode" && once.Take() {
					return c.action
				}
				if stage == routertest.StageTransfer && c.stage == routertest.StageBound { // the heir is first
					d.h.until("the heir to be gone", func() bool { return d.h.workers[2].Active() == 0 })
				}
				return routertest.Go
			}})
			if c.stage == routertest.StageRequest || c.action == routertest.Bad {
				go func() { // the source is not asked, or does not begin
					once.Within(3 * patience)
					d.h.until("the move to be over", func() bool { return len(d.results()) > 0 })
					d.release()
				}()
			}
			d.ask(movable, "d1").wantWhole(t, movable)
			if !once.Within(patience) {
				t.Error("the fault did not happen")
			}
			if n := len(d.h.r.decisions.list("")); n != c.attempts {
				t.Errorf("%d attempts, want %d: %+v", n, c.attempts, d.h.r.decisions.list(""))
			}
			got := d.results()
			delete(got, moveNotWorth) // counted where the stream has not ended before
			if len(got) != 1 || c.result != "" && got[c.result] != 1 {
				t.Errorf("moves %v, want one %s", got, c.result)
			}
		})
	}
}

// TestMoveBeforeDecodeSpeaks: prefill's token has been given and prefill is through, so that the stream may move; decode has yet to say that it
// has everything when its heir dies. That is no word of having let go.
func TestMoveBeforeDecodeSpeaks(t *testing.T) {
	var d *drainable
	var drained, asked routertest.Once
	wait := func(what string, once *routertest.Once) {
		if !once.Within(patience) {
			t.Errorf("waited in vain for %s", what)
		}
	}
	d = startDrainable(t, movePlan{workers: both3("p1", "d1", "d2"), at: 3, fault: func(call *routertest.Call, stage string, _ int) routertest.Action {
		switch {
		case stage == routertest.StageLoaded && call.Worker.ID == "d1":
			d.h.until("prefill to be gone", func() bool { return d.h.workers[0].Active() == 0 })
			if drained.Take() {
				d.drain("d1")
			}
			d.h.until("the move to be over", func() bool { return len(d.results()) > 0 })
		case stage == routertest.StageAsked:
			asked.Take()
		case stage == routertest.StageLoad && call.Worker.ID == "d2":
			wait("the source to be asked", &asked)
			return routertest.Die
		}
		return routertest.Go
	}})
	d.h.do(movable).wantWhole(t, movable)
	wait("the drain", &drained)
	if n := len(d.h.r.decisions.list("")); n != 1 {
		t.Errorf("%d attempts, want 1: %+v", n, d.h.r.decisions.list(""))
	}
	if got := d.results(); got["failed"] == 0 {
		t.Errorf("moves %v, want one failed", got)
	}
}

// TestMovesThatDoNotPay: what ends soon ends where it is, and so does what has nowhere to go, or may not.
func TestMovesThatDoNotPay(t *testing.T) {
	for name, c := range map[string]struct {
		ids     []string
		n       int
		config  func(*Config)
		mute    bool
		results []string
	}{
		"short":           {ids: []string{"p1", "d1", "d2"}, n: 8, results: []string{"not_worth"}},
		"nobody":          {ids: []string{"p1", "d1"}, n: 60, results: []string{"not_worth"}},
		"switched off":    {ids: []string{"p1", "d1", "d2"}, n: 60, config: func(c *Config) { c.Moves = -1 }},
		"an older worker": {ids: []string{"p1", "d1", "d2"}, n: 60, mute: true, results: []string{"not_offered"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			workers := both3(c.ids...)
			workers[1].NoMoves = c.mute
			d := startDrainable(t, movePlan{workers: workers, at: 3, config: c.config})
			q := movable
			q.n = c.n
			go func() {
				<-d.begun
				d.h.until("what comes of it", func() bool {
					v := d.h.r.fleet.view()
					defer d.h.r.fleet.viewed(v)
					drains := slices.ContainsFunc(v.Workers, func(c pairing.Candidate) bool { return c.Weight != nil })
					return drains && len(d.results()) == len(c.results)
				})
				d.release()
			}()
			d.ask(q, "d1").wantWhole(t, q)
			d.wantResults(1, c.results...)
		})
	}
}

// TestStreamsMoveOn: the worker that took a stream over drains, too.
func TestStreamsMoveOn(t *testing.T) {
	t.Parallel()
	again, moved := make(chan struct{}), make(chan struct{})
	hold := sync.OnceFunc(func() { close(moved); <-again })
	d := startDrainable(t, movePlan{workers: both3("p1", "d1", "d2"), at: 3, fault: func(c *routertest.Call, stage string, n int) routertest.Action {
		switch {
		case c.Worker.ID == "d2" && stage == routertest.StageToken && n == 9:
			hold()
		case c.Worker.ID == "d2" && stage == routertest.StageAsked:
			close(again)
		}
		return routertest.Go
	}})
	go func() {
		<-moved
		d.drain("d2")
	}()
	d.ask(movable, "d1").wantWhole(t, movable)
	d.wantResults(1, "moved", "moved")
	if d1, d2 := d.h.workers[1], d.h.workers[2]; d1.Calls() != 2 || d2.Calls() != 1 {
		t.Errorf("d1 got %d requests, d2 %d", d1.Calls(), d2.Calls())
	}
}

// TestChoicesMove: each answer of several by itself.
func TestChoicesMove(t *testing.T) {
	t.Parallel()
	d := startDrainable(t, movePlan{workers: both3("p1", "d1", "d2"), at: 3, config: func(c *Config) { c.Moves = 1 }})
	q := movable
	q.more = `,"n":3`
	a := d.ask(q, "d1")
	if a.err != nil || a.status != 200 || a.failure != "" || strings.Count(a.finish, "length") != 3 || len(a.spoken) != 3 {
		t.Fatalf("got %+v", a)
	}
	if n := d.results()["moved"]; n < 1 || n > 3 {
		t.Errorf("moves %v", d.results())
	}
}

// TestClientLeavesAMovingStream: everybody lets go, which the harness checks.
func TestClientLeavesAMovingStream(t *testing.T) {
	for _, c := range []struct{ who, stage string }{
		{"d2", routertest.StageRequest}, {"d2", routertest.StageBound}, {"d2", routertest.StageSettled}, {"d2", routertest.StageToken},
		{"d1", routertest.StageMove}, {"d1", routertest.StageHandoff}, {"d1", routertest.StageTransfer}, {"d1", routertest.StageSettled},
	} {
		t.Run(c.who+"-"+c.stage, func(t *testing.T) {
			t.Parallel()
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			var once routertest.Once
			d := startDrainable(t, movePlan{workers: both3("p1", "d1", "d2"), at: 3, fault: func(call *routertest.Call, stage string, _ int) routertest.Action {
				if call.Worker.ID == c.who && stage == c.stage && call.KV.Role == "decode" && once.Take() {
					leave()
					if c.stage != routertest.StageMove {
						return routertest.Wait
					}
				}
				if ctx.Err() != nil && stage == routertest.StageToken && call.Worker.ID == "d2" { // the answer does not end before the router hears of it
					return routertest.Wait
				}
				return routertest.Go
			}})
			req, err := http.NewRequestWithContext(ctx, "POST", "http://"+d.h.addr+"/v1/chat/completions", strings.NewReader(movable.body()))
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				<-d.begun
				d.drain("d1")
			}()
			resp, err := d.h.client.Do(req)
			switch {
			case err == nil:
				for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
					if strings.Contains(lines.Text(), "[DONE]") {
						t.Error("the answer is whole")
					}
				}
				_ = resp.Body.Close()
			case !errors.Is(err, context.Canceled): // it may leave before the header has come
				t.Fatal(err)
			}
			if !once.Within(patience) {
				t.Error("the client did not leave")
			}
			d.release()
			d.h.until("the request to be cancelled", func() bool {
				return sum(d.h.r.metrics.cancels) == 1
			})
		})
	}
}

// sum adds a vector's counters up.
func sum(v *prometheus.CounterVec) (n float64) {
	ch := make(chan prometheus.Metric, 64)
	go func() { v.Collect(ch); close(ch) }()
	for m := range ch {
		n += value(m)
	}
	return n
}

// TestMovesAreBounded: no more than so many at once from a worker and to one, and all come to their turn.
func TestMovesAreBounded(t *testing.T) {
	m := newMoves(2, prometheus.NewRegistry())
	a, b, c, e := &pairing.Worker{ID: "a"}, &pairing.Worker{ID: "b"}, &pairing.Worker{ID: "c"}, &pairing.Worker{ID: "e"}
	if !m.begin(a, b) || !m.begin(a, c) || m.begin(a, e) {
		t.Fatal("not two leave a")
	}
	ok, again := m.leaves(a)
	if ok || m.taken(b) != "" {
		t.Fatal("a has no place left, b has one")
	}
	if !m.begin(c, b) || m.begin(e, b) || m.taken(b) == "" {
		t.Fatal("not two go to b")
	}
	m.end(&dialects.Moved{From: a, To: b, Result: dialects.MoveDone})
	select {
	case <-again:
	default:
		t.Error("nobody is told that there is a place")
	}
	if ok, _ := m.leaves(a); !ok || m.taken(b) != "" || !m.begin(a, b) {
		t.Error("no place where one was given back")
	}
	if limitOfMoves(0) != movesUsual || limitOfMoves(-1) != 0 || limitOfMoves(7) != 7 {
		t.Error("limits")
	}
}
