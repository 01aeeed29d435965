package dialects

import (
	"bytes"
	"context"
	"errors"
	"math"
	"strconv"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// NixlName is the dialect of vLLM with its own NixlConnector, where decode pulls.
const NixlName = pairing.DialectNixl

// DefaultNixlLease is vLLM's kv_lease_duration.
const DefaultNixlLease = 30 * time.Second

// nixlMargin is kept of a lease: a tenth, for clocks, and for what lies between decode's reading and its first token.
func nixlMargin(lease time.Duration) time.Duration { return lease / 10 }

// Nixl asks prefill first and hands what it answers to decode, which pulls.
//
// Prefill keeps the blocks for a lease. Decode does not check it: what it reads later are another request's blocks, and it
// keeps them in its prefix cache. So the lease is enforced here: decode is asked at once or not at all, and its first
// token must be here in time, else its leg is closed and one worker does everything. What prefill answered is used once.
type Nixl struct {
	Client *upstream.Client
	Probes *Prober
	Lease  time.Duration // of engines that do not say
}

var _ Dialect = (*Nixl)(nil)

// Name is "vllm-nixl".
func (*Nixl) Name() string { return NixlName }

// Run serves the request by a pair or by one worker.
func (n *Nixl) Run(ctx context.Context, a *Attempt, s Sink) Outcome {
	r := &relay{Attempt: a, client: n.Client, probes: n.Probes, sink: s, tongue: tongue{leased: true}}
	return r.serve(ctx, n)
}

// pair asks prefill.
func (n *Nixl) pair(_ context.Context, r *relay) *Outcome {
	r.prefilled = func(answer []byte) *Outcome { return n.handOver(r, answer) }
	r.prefill = r.open(r.Decision.Prefill, rolePrefill, prefillBody(r.Request, "", []byte(nixlPrefill)))
	return nil
}

// nixlPrefill asks a worker to keep its blocks for another one.
const nixlPrefill = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// handOver asks decode, with what prefill answered.
func (n *Nixl) handOver(r *relay, answer []byte) *Outcome {
	params := bytes.Clone(body.Member(answer, "kv_transfer_params"))
	if params == nil { // prefill keeps nothing: decode computes it all, and nothing can go wrong
		r.answer = r.open(r.Decision.Decode, roleDecode, r.Request.Body.Whole())
		return nil
	}
	// The lease began when prefill's scheduler was done, which nobody says. It was not before prefill last answered a
	// question after its health, for its answer to the request would have come before that.
	left := time.Until(r.prefill.alive.Add(n.lease(params, time.Now())))
	late := func(l *leg) *Outcome {
		out := r.fail(l, "lease", errors.New("prefill's lease of the blocks is over before there is a token"))
		out.Whole = true
		return out
	}
	if left <= 0 {
		return late(r.prefill)
	}
	r.answer = r.open(r.Decision.Decode, roleDecode, r.Request.Body.With(withParams("", params)))
	r.until, r.late = time.Now().Add(left), func() *Outcome { return late(r.answer) }
	return nil
}

// lease is how long blocks are safe, the margin taken off. An engine that says when its lease ends says it in its own
// monotonic clock, mostly, which means nothing here; a date is taken for one, and never lengthens the lease.
func (n *Nixl) lease(params []byte, now time.Time) time.Duration {
	lease := n.Lease
	if v := gjson.GetBytes(params, "remote_blocks_expiry_time"); v.Type == gjson.Number {
		if at, err := strconv.ParseFloat(v.Raw, 64); err == nil && math.Abs(at-float64(now.Unix())) < 24*60*60 {
			lease = min(lease, time.Unix(0, int64(at*1e9)).Sub(now))
		}
	}
	return lease - nixlMargin(n.Lease)
}
