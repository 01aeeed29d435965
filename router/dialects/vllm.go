package dialects

import (
	"context"
	"encoding/base64"
	"strconv"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// VLLMName is the dialect of vLLM with Headrace's connector.
const VLLMName = "vllm"

// A prefill that has answered has presented its ticket, as a rule; so decode has its KV cache soon. Where it has not begun a
// while later its daemon is asked, again and again: prefill's lease may have ended where nobody could tell decode, because a
// daemon was killed.
const (
	missFirst = 250 * time.Millisecond
	missEvery = 500 * time.Millisecond
)

// Recaller voids tickets. Its methods do not wait: it is the daemons that hear of it, soon.
type Recaller interface {
	// Recall voids a ticket at d's daemon, whatever has become of it.
	Recall(d *pairing.Worker, ticket []byte)
	// Check voids a ticket that p's daemon has no lease of and nobody has presented at d's, so that d need not wait for it.
	Check(p, d *pairing.Worker, ticket []byte)
}

// VLLM sends both legs at once with one ticket, as Native does. vLLM computes the prompt's last token again and samples the
// answer's first one itself, so that the client is answered by decode alone, in decode's bytes.
type VLLM struct {
	Client   *upstream.Client
	Key      []byte // the cluster's
	Probes   *Prober
	Recaller Recaller // nil: tickets run out by themselves
}

var _ Dialect = (*VLLM)(nil)

// Name is "vllm".
func (*VLLM) Name() string { return VLLMName }

// Run serves the request by a pair or by one worker.
func (v *VLLM) Run(ctx context.Context, a *Attempt, s Sink) Outcome {
	r := &relay{Attempt: a, client: v.Client, probes: v.Probes, sink: s}
	return r.serve(ctx, v)
}

// pair sends both legs.
func (v *VLLM) pair(_ context.Context, r *relay) *Outcome {
	d := r.Decision
	ticket, err := r.mint(v.Key)
	if err != nil {
		return unminted(d, err)
	}
	if v.Recaller != nil {
		r.tongue.ticketed, r.recall = true, func() { v.Recaller.Recall(d.Decode, ticket) }
	}
	r.prefilled = func(answer []byte) *Outcome { // what it sampled is of no use
		if v.Recaller != nil {
			v.watch(r, ticket, gjson.GetBytes(answer, "kv_transfer_params.headrace.state").String())
		}
		return nil
	}
	r.answer = r.open(d.Decode, roleDecode, r.Request.Body.With(withParams("", headraceParams(roleDecode, ticket, "", r.Request.Deadline))))
	r.prefill = r.open(d.Prefill, rolePrefill, prefillBody(r.Request, "", headraceParams(rolePrefill, ticket, d.Decode.NodeData, r.Request.Deadline)))
	return nil
}

// watch sees to it that decode does not wait in vain, from prefill's answer on, which says how its lease is.
func (v *VLLM) watch(r *relay, ticket []byte, state string) {
	d := r.Decision
	wait := missFirst
	switch state {
	case "settled":
		return // decode has it
	case "failed":
		// Its KV cache will not come. Unless decode knows, having refused it because it needs none, it computes the prompt now.
		// Its daemon may be away for a moment, and is asked again.
		v.Recaller.Recall(d.Decode, ticket)
		wait = missEvery
	}
	r.miss = time.Now().Add(wait)
	r.missed = func() {
		v.Recaller.Check(d.Prefill, d.Decode, ticket)
		r.miss = time.Now().Add(missEvery)
	}
}

// headraceParams is what the connector is told, by way of vLLM's kv_transfer_params.
func headraceParams(role string, ticket []byte, peer string, deadline time.Time) []byte {
	b := append([]byte(`{"headrace":{"v":1,"role":"`), role...)
	b = append(b, `","ticket":"`...)
	b = base64.StdEncoding.AppendEncode(b, ticket)
	b = append(b, '"')
	if peer != "" {
		b = openai.AppendString(append(b, `,"peer":`...), peer)
	}
	return append(strconv.AppendInt(append(b, `,"deadline_ms":`...), deadline.UnixMilli(), 10), "}}"...)
}
