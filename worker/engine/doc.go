// Package engine is the reference engine's loop: continuous batching with chunked prefill over a paged KV cache,
// automatic prefix caching, and the engine's half of a KV hand-off (present, bind, push, settle, fence).
//
// One goroutine, the loop, owns all request and block state; everything else reaches it by posting functions. It
// knows token ids, blocks and leases; it must not know text, HTTP or the network. Results do not depend on what
// else is in a batch: package model promises that, and sampling is a pure function of position and seed.
package engine
