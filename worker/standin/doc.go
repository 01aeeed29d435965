// Package standin is an engine that computes nothing: it takes as long as a timing table says an engine would, holds the
// KV blocks that one would hold, finds prefixes as one would, and answers with tokens drawn from a hash of the context.
// Thousands of streams fit into one process, because a step of an engine is one timer, whatever the number of streams.
//
// Everything a client or a router sees of it is package api's: endpoints, metrics, the native dialect. What it publishes
// of its cache is package kvevents'. Instant is the other kind: a server without any account of time or memory, for
// measurements of what stands in front of it.
//
// The same seed, table and requests give the same tokens, and under a virtual clock the same times.
package standin
