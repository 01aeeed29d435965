package pairing

// Dialects that pair otherwise than by node daemons.
const (
	DialectNixl     = "vllm-nixl"      // vLLM's NixlConnector: decode pulls
	DialectNixlPush = "vllm-nixl-push" // vLLM's NixlPushConnector
	DialectMooncake = "vllm-mooncake"  // vLLM's MooncakeConnector
	DialectNCCL     = "vllm-p2p-nccl"  // vLLM's P2pNcclConnector
	DialectSGLang   = "sglang"         // SGLang in its prefill and decode modes
	DialectPlain    = "openai"         // not at all
)

// trait is how the workers of a dialect pair.
type trait struct {
	itself bool // by a connector of their own, not by node daemons
	never  bool // not at all
	// What the other end must be told of prefill and decode: without it there is no pair.
	sendsAddr, takesAddr, sendsEngine bool
	// paired workers serve nothing whole, unless they have both roles.
	paired bool
	// layered: what is computed goes out while the rest is.
	layered bool
}

// traits has the dialects that are not about node daemons.
var traits = map[string]trait{
	DialectNixl:     {itself: true},
	DialectNixlPush: {itself: true, sendsAddr: true, sendsEngine: true},
	DialectMooncake: {itself: true, sendsAddr: true},
	DialectNCCL:     {itself: true, sendsAddr: true, takesAddr: true, paired: true, layered: true},
	DialectSGLang:   {itself: true, sendsAddr: true, paired: true, layered: true},
	DialectPlain:    {never: true},
}

// sends and takes tell whether the worker can be one end of a pair.
func (w *Worker) sends() bool {
	t := traits[w.Dialect]
	switch {
	case !w.Role.Prefills() || t.never:
		return false
	case t.itself:
		return !(t.sendsAddr && w.KVAddr == "") && !(t.sendsEngine && w.KVEngine == "")
	}
	return w.NodeID != ""
}

func (w *Worker) takes() bool {
	t := traits[w.Dialect]
	switch {
	case !w.Role.Decodes() || t.never:
		return false
	case t.itself:
		return !t.takesAddr || w.KVAddr != ""
	}
	return w.NodeID != "" && w.NodeData != ""
}

// byDaemons tells whether the worker's KV cache moves through node daemons.
func (w *Worker) byDaemons() bool {
	t := traits[w.Dialect]
	return !t.itself && !t.never
}

// Alone tells whether the worker can serve a request by itself. SGLang in one of its modes waits for the other end for ever,
// and vLLM's P2pNcclConnector ends its engine over a request that names no peer.
func (w *Worker) Alone() bool {
	t := traits[w.Dialect]
	return !t.paired || w.Role == RoleBoth && w.Dialect != DialectNCCL
}
