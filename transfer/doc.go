// Package transfer moves KV cache between the memory of inference engines. It owns the words of the data plane: Region
// (memory an engine lends), Layout (what the memory means), Plan (which bytes go where), Lease (the right of one peer to
// write named blocks until a deadline), Channel (the connection of two daemons, with its lanes) and Fence (what revoking
// means: when it returns, no byte lands and none is read from the source any more).
//
// An Engine is the heart of one node daemon. Engines (the other kind, that run models) are its Clients; they reach it
// through package transfer/node, this package knows no sockets to them. How bytes travel is a Transport's business:
// transfer/tcp, transfer/shm and rdma satisfy the interface this package states, and transfer/transporttest holds them
// to it. This package must not know what a prompt, a token id or a hand-off record means.
//
// Lock order: Engine.mu, then channel.mu, then lease.mu, then Client.evMu. A guard (see guard.go) is no lock: it is held
// around one system call or one copied piece and nothing is locked while it is waited for.
package transfer
