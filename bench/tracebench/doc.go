// Package tracebench replays a trace of requests in real time: stand-in engines in processes of their own, which publish
// KV events, a router of ours in front of them with one pairing policy after the other, and clients that read streams over
// HTTP. bench/pairsim says how fast the engines are to be. It knows no engine's inside.
package tracebench
