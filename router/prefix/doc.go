// Package prefix knows which worker holds which prefix of a prompt in its KV cache. What engines say of their blocks makes
// it exact (it is a collect.Sink); of workers that say nothing it remembers what was routed to them.
//
// Engines name blocks as they like, so the index keeps, for each block, a hash of its own over the tokens and all before
// them, and the engine's name beside it for removals. Blocks of all workers lie in one open-addressing table of segments
// of a fixed size, which is all the memory there is to speak of: its limit is a limit of the heap. Lookups take no lock.
//
// It must not know requests, policies, HTTP or the registry.
package prefix
