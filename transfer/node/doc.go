// Package node is the node daemon: it lends its transfer.Engine to the inference engines of one host over a unix socket
// (package wire, docs/protocol.md) and answers operators over HTTP. One connection is one engine: when it closes, the
// engine's leases are fenced and its memory is deregistered before an engine of the same id may attach again.
//
// It must not know what a prompt is, nor how bytes travel, and it registers itself nowhere: cmd/headrace does.
package node
