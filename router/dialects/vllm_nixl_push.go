package dialects

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"strconv"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// NixlPushName is the dialect of vLLM with its own NixlPushConnector, where prefill writes into decode's blocks.
const NixlPushName = pairing.DialectNixlPush

// NixlPush sends both legs at once. Decode is told who prefills, tells that engine which blocks it has taken for the request,
// and prefill writes into them when it is done.
//
// vLLM finds the two halves of a request by its id, so that no two dispatches may ever have the same one; what a client calls its
// request is not passed on.
type NixlPush struct {
	Client *upstream.Client
	Probes *Prober
}

var _ Dialect = (*NixlPush)(nil)

// Name is "vllm-nixl-push".
func (*NixlPush) Name() string { return NixlPushName }

// Run serves the request by a pair or by one worker.
func (n *NixlPush) Run(ctx context.Context, a *Attempt, s Sink) Outcome {
	r := &relay{Attempt: a, client: n.Client, probes: n.Probes, sink: s, tongue: tongue{leased: true}}
	return r.serve(ctx, n)
}

// pair sends both legs.
func (n *NixlPush) pair(_ context.Context, r *relay) *Outcome {
	d := r.Decision
	id := uuid()
	transfer := "xfer-" + id
	host, port, err := splitAddr(d.Prefill.KVAddr)
	if err != nil {
		return r.unregistered(d.Prefill, err)
	}
	params := openai.AppendString([]byte(`{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":`), d.Prefill.KVEngine)
	params = openai.AppendString(append(params, `,"remote_host":`...), host)
	params = fmt.Appendf(params, `,"remote_port":%d,"tp_size":%d,"pp_size":%d`, port, max(d.Prefill.TensorParallel, 1), max(d.Prefill.PipelineParallel, 1))
	params = openai.AppendString(append(params, `,"remote_request_id":`...), id)
	params = append(openai.AppendString(append(params, `,"transfer_id":`...), transfer), '}')
	r.answer = r.send(call{worker: d.Decode, role: roleDecode, id: id, body: named(r.Request, id, withParams("", params))})
	kv := append(openai.AppendString([]byte(nixlPrefill[:len(nixlPrefill)-1]+`,"transfer_id":`), transfer), '}')
	r.prefill = r.send(call{worker: d.Prefill, role: rolePrefill, id: id, body: prefillBody(r.Request, id, kv)})
	return nil
}

// clientsID is a response's id in its body, which counts for vLLM in place of the header's.
var clientsID = set("request_id")

// named is the client's body with further members, and with an id where the header's does not count.
func named(q *Request, id string, added []byte) [][]byte {
	if q.Path != PathResponses {
		if len(added) == 0 {
			return q.Body.Whole()
		}
		return q.Body.With(added)
	}
	if len(added) > 0 {
		added = append(added, ',')
	}
	return q.Body.Without(clientsID, openai.AppendString(append(added, `"request_id":`...), id))
}

// uuid is 128 random bits in hex: of one length, so that none is another's beginning.
func uuid() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// splitAddr reads host:port.
func splitAddr(addr string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(addr)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	if err != nil || port <= 0 || port > 65535 || host == "" {
		return "", 0, fmt.Errorf("its connector is registered at %q, want HOST:PORT", addr)
	}
	return host, port, nil
}

// unregistered is the outcome where a worker's entry does not say enough to speak with it.
func (r *relay) unregistered(w *pairing.Worker, err error) *Outcome {
	out := r.fail(&leg{worker: w, role: rolePrefill}, "unregistered", err)
	out.Undialled = true
	return out
}
