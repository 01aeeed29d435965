package pairing

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

var now = time.Unix(1_790_000_000, 0)

func worker(id string, role Role) Candidate {
	return Candidate{Worker: &Worker{ID: id, Role: role, Model: "m", Addr: id + ":1", NodeID: "n-" + id, NodeData: id + ":2", Fingerprint: "f", BlockTokens: 16}}
}

func with(c Candidate, change func(*Candidate)) Candidate {
	change(&c)
	return c
}

func opaque(c Candidate, blockTokens, ranks uint32) Candidate {
	c.Opaque, c.BlockTokens, c.TensorParallel = true, blockTokens, ranks
	return c
}

func speaks(c Candidate, dialect string) Candidate {
	c.Dialect = dialect
	return c
}

// reached is a worker whose own connector has an address.
func reached(c Candidate) Candidate {
	c.KVAddr = c.ID + ":8998"
	return c
}

// alone is a worker without a daemon.
func alone(c Candidate, dialect string) Candidate {
	c.Dialect, c.NodeID, c.NodeData, c.Fingerprint = dialect, "", "", ""
	return c
}

func TestLeastLoaded(t *testing.T) {
	busy := func(tokens, decodes int64) func(*Candidate) {
		return func(c *Candidate) { c.Load = Load{PrefillTokens: tokens, Decodes: decodes} }
	}
	cooling := func(c *Candidate) { c.CoolUntil, c.CoolReason = now.Add(time.Second), "refused" }
	for _, tt := range []struct {
		name    string
		workers []Candidate
		request Request
		barred  string
		want    string // p>d or whole worker
		reason  string
	}{
		{name: "a pair", workers: []Candidate{worker("p", RolePrefill), worker("d", RoleDecode)}, want: "p>d", reason: "pair"},
		{name: "the least loaded of each", workers: []Candidate{
			with(worker("p1", RolePrefill), busy(100, 0)), with(worker("p2", RolePrefill), busy(10, 0)),
			with(worker("d1", RoleDecode), busy(0, 1)), with(worker("d2", RoleDecode), busy(0, 3))}, want: "p2>d1"},
		{name: "only decode", workers: []Candidate{worker("d", RoleDecode)}, want: "d", reason: "no prefill worker"},
		{name: "only prefill", workers: []Candidate{worker("p", RolePrefill)}, want: "p", reason: "no decode worker"},
		{name: "one of both roles", workers: []Candidate{worker("b", RoleBoth)}, want: "b", reason: "no two workers"},
		{name: "two of both roles", workers: []Candidate{with(worker("b1", RoleBoth), busy(9, 0)), with(worker("b2", RoleBoth), busy(8, 0)), with(worker("b3", RoleBoth), busy(900, 0))}, want: "b1>b2 b2>b1"},
		{name: "decode without a daemon", workers: []Candidate{worker("p", RolePrefill), with(worker("d", RoleDecode), func(c *Candidate) { c.NodeData = "" })}, want: "d", reason: "no decode worker with"},
		{name: "prefill without a daemon", workers: []Candidate{with(worker("p", RolePrefill), func(c *Candidate) { c.NodeID = "" }), worker("d", RoleDecode)}, want: "d", reason: "no prefill worker with"},
		{name: "other fingerprint", workers: []Candidate{worker("p", RolePrefill), with(worker("d", RoleDecode), func(c *Candidate) { c.Fingerprint = "g" })}, want: "d", reason: "no two"},
		{name: "equal blocks before less load", workers: []Candidate{worker("p", RolePrefill), with(worker("d1", RoleDecode), func(c *Candidate) { c.BlockTokens = 32 }), with(worker("d2", RoleDecode), busy(0, 5))}, want: "p>d2"},
		{name: "equal ranks before less load", workers: []Candidate{worker("p", RolePrefill), with(worker("d1", RoleDecode), func(c *Candidate) { c.TensorParallel = 2 }), with(worker("d2", RoleDecode), busy(0, 5))}, want: "p>d2"},
		{name: "other blocks rather than none", workers: []Candidate{worker("p", RolePrefill), with(worker("d", RoleDecode), func(c *Candidate) { c.BlockTokens = 32 })}, want: "p>d"},
		{name: "cooling is left alone", workers: []Candidate{worker("p", RolePrefill), with(worker("d1", RoleDecode), cooling), with(worker("d2", RoleDecode), busy(0, 5))}, want: "p>d2"},
		{name: "cooling rather than nothing", workers: []Candidate{with(worker("p", RolePrefill), cooling), with(worker("d", RoleDecode), cooling)}, want: "p>d", reason: "cool down"},
		{name: "excluded", workers: []Candidate{worker("p", RolePrefill), worker("d1", RoleDecode), worker("d2", RoleDecode)}, request: Request{Exclude: []string{"d1"}}, want: "p>d2"},
		{name: "whole asked for", workers: []Candidate{worker("p", RolePrefill), worker("d", RoleDecode)}, request: Request{Whole: true}, want: "d", reason: "asks for one"},
		{name: "barred pair", workers: []Candidate{worker("p", RolePrefill), worker("d1", RoleDecode), with(worker("d2", RoleDecode), busy(0, 5))}, barred: "p>d1", want: "p>d2"},
		{name: "opaque blocks of one size", workers: []Candidate{opaque(worker("p", RolePrefill), 32, 1), opaque(worker("d1", RoleDecode), 64, 1), opaque(worker("d2", RoleDecode), 32, 1)}, want: "p>d2"},
		{name: "opaque blocks of two sizes", workers: []Candidate{opaque(worker("p", RolePrefill), 32, 1), opaque(worker("d", RoleDecode), 64, 1)}, want: "d", reason: "opaque blocks of 32 and 64 tokens"},
		{name: "opaque blocks over other ranks", workers: []Candidate{opaque(worker("p", RolePrefill), 32, 1), opaque(worker("d", RoleDecode), 32, 2)}, want: "d", reason: "opaque blocks over 1 and 2 ranks"},
		{name: "opaque blocks and others", workers: []Candidate{opaque(worker("p", RolePrefill), 16, 0), worker("d", RoleDecode)}, want: "d", reason: "opaque blocks and others"},
		{name: "other dialects", workers: []Candidate{speaks(worker("p", RolePrefill), "vllm"), worker("d", RoleDecode)}, want: "d", reason: "dialects vllm and"},
		{name: "each with its like", workers: []Candidate{speaks(worker("p", RolePrefill), "vllm"), worker("d1", RoleDecode), speaks(with(worker("d2", RoleDecode), busy(0, 9)), "vllm")}, want: "p>d2"},
		{name: "NIXL needs no daemon", workers: []Candidate{alone(worker("p", RolePrefill), DialectNixl), alone(worker("d", RoleDecode), DialectNixl)}, want: "p>d"},
		{name: "our connector does", workers: []Candidate{alone(worker("p", RolePrefill), "vllm"), alone(worker("d", RoleDecode), "vllm")}, want: "d", reason: "no prefill worker with"},
		{name: "those that find each other need addresses", workers: []Candidate{alone(worker("p", RolePrefill), DialectMooncake), alone(worker("d", RoleDecode), DialectMooncake)}, want: "d", reason: "no prefill worker"},
		{name: "Mooncake with one", workers: []Candidate{reached(alone(worker("p", RolePrefill), DialectMooncake)), alone(worker("d", RoleDecode), DialectMooncake)}, want: "p>d"},
		{name: "NixlPush with an address and no id", workers: []Candidate{reached(alone(worker("p", RolePrefill), DialectNixlPush)), alone(worker("d", RoleDecode), DialectNixlPush)}, want: "d", reason: "no prefill worker"},
		{name: "SGLang, never whole", workers: []Candidate{reached(alone(worker("p", RolePrefill), DialectSGLang)), alone(worker("d", RoleDecode), DialectSGLang)}, request: Request{Whole: true}, want: "p>d"},
		{name: "SGLang beside one that can", workers: []Candidate{reached(alone(worker("p", RolePrefill), DialectSGLang)), alone(worker("d", RoleDecode), DialectSGLang), alone(worker("e", RoleBoth), DialectPlain)}, request: Request{Whole: true}, want: "e"},
		{name: "NCCL, each with an address", workers: []Candidate{reached(alone(worker("p", RolePrefill), DialectNCCL)), reached(alone(worker("d", RoleDecode), DialectNCCL))}, want: "p>d"},
		{name: "no connector, no pair", workers: []Candidate{alone(worker("b1", RoleBoth), DialectPlain), alone(worker("b2", RoleBoth), DialectPlain)}, want: "b1 b2", reason: "without a connector"},
		{name: "a request that cannot be shared", workers: []Candidate{worker("p", RolePrefill), worker("d", RoleDecode)}, request: Request{Unpaired: func(string) string { return "echo" }}, want: "d", reason: "echo"},
		{name: "shared where it can be", workers: []Candidate{speaks(worker("p1", RolePrefill), "vllm"), speaks(worker("d1", RoleDecode), "vllm"), worker("p2", RolePrefill), worker("d2", RoleDecode)},
			request: Request{Unpaired: func(dialect string) string { return dialect }}, want: "p2>d2"},
		{name: "refused workers", workers: []Candidate{worker("p", RolePrefill), worker("d1", RoleDecode), worker("d2", RoleDecode)},
			request: Request{Refuse: func(w *Worker) string { return map[string]string{"d1": "speaks another tongue"}[w.ID] }}, want: "p>d2"},
		{name: "other model", workers: []Candidate{with(worker("p", RolePrefill), func(c *Candidate) { c.Model = "x" }), worker("d", RoleDecode)}, want: "d"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := &View{Now: now, Workers: tt.workers, PairBarred: func(p, d string) bool { return p+">"+d == tt.barred }}
			tt.request.Model = "m"
			d, err := (&LeastLoaded{}).Pick(context.Background(), tt.request, v)
			if err != nil {
				t.Fatal(err)
			}
			var got string
			if d.Whole != nil {
				got = d.Whole.ID
			} else {
				got = d.Prefill.ID + ">" + d.Decode.ID
			}
			if !strings.Contains(" "+tt.want+" ", " "+got+" ") || !strings.Contains(d.Reason, tt.reason) {
				t.Errorf("Pick = %s (%s), want %s (%s)", got, d.Reason, tt.want, tt.reason)
			}
		})
	}
}

func TestNone(t *testing.T) {
	v := &View{Now: now, Workers: []Candidate{worker("p", RolePrefill)}}
	for _, tt := range []struct {
		r     Request
		known bool
	}{{Request{Model: "x"}, false}, {Request{Model: "m", Exclude: []string{"p"}}, true}} {
		_, err := (&LeastLoaded{}).Pick(context.Background(), tt.r, v)
		var none *ErrNone
		if !errors.As(err, &none) || none.ModelKnown != tt.known {
			t.Errorf("Pick(%+v) = %v", tt.r, err)
		}
	}
}

func TestTiesGoRound(t *testing.T) {
	v := &View{Now: now, Workers: []Candidate{worker("p", RolePrefill), worker("d1", RoleDecode), worker("d2", RoleDecode), worker("d3", RoleDecode)}}
	var p LeastLoaded
	seen := map[string]int{}
	for range 40 {
		d, err := p.Pick(context.Background(), Request{Model: "m"}, v)
		if err != nil {
			t.Fatal(err)
		}
		seen[d.Decode.ID]++
	}
	if len(seen) != 3 || seen["d1"] < 5 || seen["d2"] < 5 || seen["d3"] < 5 {
		t.Errorf("of 40 equal choices: %v", seen)
	}
}

// TestNobodyAlone: with half a pair of those that serve nothing whole there is no decision, by any policy.
func TestNobodyAlone(t *testing.T) {
	for _, dialect := range []string{DialectSGLang, DialectNCCL} {
		for _, name := range Names {
			p, err := New(name, 1)
			if err != nil {
				t.Fatal(err)
			}
			for _, whole := range []bool{false, true} {
				d, err := p.Pick(context.Background(), Request{Model: "m", Whole: whole}, &View{Now: now, Workers: []Candidate{alone(worker("d", RoleDecode), dialect)}})
				var none *ErrNone
				if !errors.As(err, &none) || !none.ModelKnown {
					t.Errorf("%s, %s: %+v, %v", dialect, name, d, err)
				}
			}
		}
	}
}
