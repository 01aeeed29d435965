package dialects

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// NCCLName is the dialect of vLLM with its P2pNcclConnector.
const NCCLName = pairing.DialectNCCL

// NCCL asks prefill first, then decode. Who sends to whom stands in the request's id, and nowhere else; an engine that reads an
// id without it ends. Prefill sends while it computes, decode keeps what it gets until the request comes.
type NCCL struct {
	Client  *upstream.Client
	Probes  *Prober
	Errands *Errands
}

var _ Dialect = (*NCCL)(nil)

// Name is "vllm-p2p-nccl".
func (*NCCL) Name() string { return NCCLName }

// Run serves the request by a pair.
func (n *NCCL) Run(ctx context.Context, a *Attempt, s Sink) Outcome {
	r := &relay{Attempt: a, client: n.Client, probes: n.Probes, sink: s, tongue: tongue{leased: true, stored: true}}
	if w := a.Decision.Whole; w != nil {
		return *r.unregistered(w, errors.New("it serves no request without a peer"))
	}
	return r.serve(ctx, n)
}

// pair asks prefill.
func (n *NCCL) pair(_ context.Context, r *relay) *Outcome {
	d := r.Decision
	for _, w := range []*pairing.Worker{d.Prefill, d.Decode} {
		if _, _, err := splitAddr(w.KVAddr); err != nil {
			return r.unregistered(w, err)
		}
	}
	id := fmt.Sprintf("___prefill_addr_%s___decode_addr_%s_%s", d.Prefill.KVAddr, d.Decode.KVAddr, uuid())
	r.prefilled = func([]byte) *Outcome {
		r.answer = r.send(call{worker: d.Decode, role: roleDecode, id: id, body: named(r.Request, id, nil)})
		return nil
	}
	one := [][]byte{slices.Concat(prefillBody(r.Request, id, nil)...)} // a copy: the errand outlives the client's request
	r.through = func(prefill *leg) bool { return n.seeThrough(r, prefill, d.Decode, id, one) }
	r.prefill = r.send(call{worker: d.Prefill, role: rolePrefill, id: id, body: one})
	return nil
}

// seeThrough lets prefill end, of a request that nobody wants any more, and has decode take what it was sent, for one token.
// A prefill that were aborted in the middle would leave its layers with decode for good.
func (n *NCCL) seeThrough(r *relay, prefill *leg, d *pairing.Worker, id string, body [][]byte) bool {
	return n.Errands.run(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, seeThroughMax)
		defer cancel()
		defer prefill.Close()
		if prefill.ended && !prefill.whole { // it died: decode would wait in its step for what will not come
			return
		}
		if !prefill.ended {
			if status, _, err := whole(ctx, prefill.Leg); err != nil || status != http.StatusOK {
				return
			}
		}
		l := n.Client.Open(target(d), upstream.Request{Path: r.Request.Path, RequestID: id, Body: body, Accept: "application/json", Patient: true, WholeBytesMax: wholeBytesMax})
		defer l.Close()
		_, _, _ = whole(ctx, l) // it has served the request, or died
	})
}
