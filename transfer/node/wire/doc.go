// Package wire is the protocol an engine speaks with the node daemon of its host over a unix stream
// socket: a fixed 24-byte header, little-endian payloads with every field at a fixed offset, and
// file descriptors by SCM_RIGHTS with REGISTER_REGION alone. docs/protocol.md describes it byte by byte.
//
// A stream socket rather than SEQPACKET: hand-off records reach 1 MiB, while one SEQPACKET datagram
// must fit the socket's send buffer (about 208 KiB unless an administrator raised it).
//
// The package knows bytes only: nothing of leases, regions or transports, and it imports nothing of ours.
package wire
