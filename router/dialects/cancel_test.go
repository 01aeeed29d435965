package dialects

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/routertest"
	"github.com/headrace/headrace/router/upstream"
)

// stage is a set of two fake engines of a dialect and what the router has for them, in a synctest bubble.
type stage struct {
	*testing.T
	cluster    *routertest.Cluster
	p, d       *routertest.Engine
	client     *upstream.Client
	probes     *Prober
	errands    *Errands
	bootstraps *Bootstraps
	dialect    Dialect
}

var testKey = routertest.Key

// onStage runs f with a pair of engines.
func onStage(t *testing.T, dialect string, f func(s *stage)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		wire := &routertest.Wire{}
		s := &stage{T: t, cluster: routertest.NewCluster(), client: upstream.New(upstream.Config{Dial: wire.Dial})}
		make := func(id string, role pairing.Role) *routertest.Engine {
			e := &routertest.Engine{Worker: pairing.Worker{ID: id, Role: role, Dialect: dialect}, Cluster: s.cluster, Ranks: 3}
			e.Wire = wire
			if err := e.Start(); err != nil {
				t.Fatal(err)
			}
			return e
		}
		s.p, s.d = make("p", pairing.RolePrefill), make("d", pairing.RoleDecode)
		s.probes = NewProber(s.client, 3*time.Second, 10*time.Second)
		s.errands, s.bootstraps = NewErrands(s.client, nil), NewBootstraps(s.client)
		for _, d := range []Dialect{
			&VLLM{Client: s.client, Key: testKey, Probes: s.probes, Recaller: s.cluster}, &Nixl{Client: s.client, Probes: s.probes, Lease: 30 * time.Second},
			&NixlPush{Client: s.client, Probes: s.probes}, &Mooncake{Client: s.client, Probes: s.probes, Bootstraps: s.bootstraps},
			&NCCL{Client: s.client, Probes: s.probes, Errands: s.errands}, &SGLang{Client: s.client, Probes: s.probes, Errands: s.errands},
		} {
			if d.Name() == dialect {
				s.dialect = d
			}
		}
		defer func() {
			s.errands.Close()
			s.client.Close()
			s.probes.Wait()
			s.bootstraps.Wait()
			s.p.Stop()
			s.d.Stop()
			for _, v := range s.cluster.Violations() {
				t.Errorf("the protocol is broken: %s", v)
			}
		}()
		f(s)
	})
}

// attempt is one at the two engines.
func (s *stage) attempt(text, path string) *Attempt {
	s.Helper()
	b, refused := body.Parse([]byte(text))
	if refused != nil {
		s.Fatal(refused)
	}
	return &Attempt{Number: 1, Progress: &Progress{}, Decision: pairing.Decision{Prefill: &s.p.Worker, Decode: &s.d.Worker},
		Request: &Request{Path: path, ID: "cmpl-1", RequestID: "r", Body: b, Deadline: time.Now().Add(time.Hour), Stream: b.Stream}}
}

// quiet holds that nothing is left of any request.
func (s *stage) quiet(within time.Duration) {
	s.Helper()
	began := time.Now()
	for {
		synctest.Wait()
		legs, _ := s.client.Counts()
		if s.cluster.Held() == 0 && s.p.Active() == 0 && s.d.Active() == 0 && legs == 0 && s.errands.Pending() == 0 {
			return
		}
		if time.Since(began) > within {
			s.Fatalf("after %s: %d blocks held, %d and %d requests served, %d legs, %d errands", within, s.cluster.Held(), s.p.Active(), s.d.Active(), legs, s.errands.Pending())
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// phasesOf are the moments at which a request is cancelled: where each of the two engines is then.
var phasesOf = []struct{ role, stage string }{
	{"prefill", routertest.StageRequest},  // its server has it, its scheduler has not
	{"prefill", routertest.StagePrefill},  // it computes
	{"prefill", routertest.StageAnswer},   // it has computed, and nobody knows
	{"prefill", routertest.StageAnswered}, // the router has its answer
	{"decode", routertest.StageRequest},
	{"decode", routertest.StageLoad},
	{"decode", routertest.StageLoaded},
	{"decode", routertest.StageToken},
	{"decode", routertest.StageFinish},
}

// TestCancelInEachPhase cancels a request at each moment in each dialect; the engines come to the moment and go on half a
// second later, as ones that compute do. All that they held comes back in the time that the dialect needs for it.
func TestCancelInEachPhase(t *testing.T) {
	gone := errors.New("the client left")
	for _, dialect := range []string{VLLMName, NixlName, NixlPushName, MooncakeName, NCCLName, SGLangName} {
		for _, phase := range phasesOf {
			for _, stream := range []bool{false, true} {
				if !stream && phase.stage == routertest.StageFinish {
					continue // there is no such moment
				}
				t.Run(fmt.Sprintf("%s/%s-%s/stream=%v", dialect, phase.role, phase.stage, stream), func(t *testing.T) {
					onStage(t, dialect, func(s *stage) {
						at := make(chan struct{}, 1)
						once := &routertest.Once{}
						for _, e := range []*routertest.Engine{s.p, s.d} {
							e.Fault = func(c *routertest.EngineCall, stage string, _ int) routertest.Action {
								if c.Role == phase.role && stage == phase.stage && once.Take() {
									at <- struct{}{}
									time.Sleep(500 * time.Millisecond)
								}
								time.Sleep(10 * time.Millisecond)
								return routertest.Go
							}
						}
						ctx, cancel := context.WithCancelCause(context.Background())
						defer cancel(gone)
						done := make(chan Outcome, 1)
						a := s.attempt(fmt.Sprintf(`{"model":"fake","prompt":"some words","max_tokens":40,"stream":%v}`, stream), "/v1/completions")
						go func() { done <- s.dialect.Run(ctx, a, &tape{}) }()
						select {
						case <-at:
						case out := <-done:
							if dialect == SGLangName && phase.role == "prefill" && phase.stage == routertest.StageAnswered && out.Result == Finished {
								s.quiet(3 * time.Second) // once decode has begun nobody waits for prefill's last words
								return
							}
							s.Fatalf("the moment does not come; got %+v", out)
						}
						synctest.Wait() // whatever else there is to happen at this moment has
						before := time.Now()
						cancel(gone)
						out := <-done
						if took := time.Since(before); took != 0 {
							s.Errorf("the client's request ends %s behind its cancellation", took)
						}
						finished := phase.stage == routertest.StageFinish || out.Result == Finished // the answer may have come just then
						if !finished && (out.Result != Cancelled || !errors.Is(out.Err, gone)) {
							s.Errorf("got %+v", out)
						}
						within := 3 * time.Second
						if dialect == NixlName && phase.stage == routertest.StageAnswer {
							within = 31 * time.Second // what prefill keeps for an answer that nobody has heard, it keeps for its lease
						}
						s.quiet(within)
						s.aborts(out.Result == Finished)
					})
				})
			}
		}
	}
}

// aborts holds that SGLang was told twice, two seconds apart, or not at all.
func (s *stage) aborts(finished bool) {
	for _, e := range []*routertest.Engine{s.p, s.d} {
		for rid, at := range e.Aborts() {
			if len(at) != 2 || at[1].Sub(at[0]) != abortAgain {
				s.Errorf("%s was told to abort %s at %v", e.ID, rid, at)
			}
			if finished {
				s.Errorf("%s was told to abort what was answered", e.ID)
			}
		}
		if n := len(e.Aborts()); n == 0 && e == s.d && !finished && e.Dialect == SGLangName {
			s.Errorf("%s was not told to abort", e.ID)
		}
	}
}
