// Package gpumem is for engines whose KV cache lies on a GPU: how it gets into memory that the node daemon can move, and from one
// process's GPU memory into another's on the same host. All of it runs in the engine's process; the daemon opens no CUDA.
//
//   - Export lends the memory itself, where the driver exports it and a NIC takes it.
//   - Staging copies over pinned host memory that is lent instead, where they do not.
//   - Offer and Peers copy between two processes on one host, and nothing but the offer goes by the daemon.
//
// It must know no model, no scheduler and no protocol: what goes over the socket is the engine's business.
package gpumem
