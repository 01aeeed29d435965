// Package router is Headrace's OpenAI front: it admits requests, pairs a prefill with a decode worker, sends the request
// to both and splices what they stream into one response. It owns a request from its first byte to its last: whoever
// fails on the way, the client gets a right answer or a clear error, and when the client leaves nobody works on.
//
// It never touches KV bytes, has no model and no tokenizer, and dials nobody but registered workers.
//
// A request is served by one goroutine, which owns its state; beside it there is one reader a leg (router/upstream)
// and one that watches the client's socket (watch.go). All are gone when the request is.
package router
