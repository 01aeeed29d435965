// Package rdma is the transport over RDMA verbs: a queue pair a lane, on which the writer puts pieces straight into the
// other daemon's regions and then announces them. It knows nothing of leases but their guards, and nothing of libibverbs
// but what package cgo wraps.
//
// # A lane
//
// A lane is a reliable connected queue pair at each end and the authenticated stream over which the two found each other.
// The stream carries a hello each way, and later one byte: "my queue pair is in the error state and drained". So each
// end learns of the other's end, and packets of a dead lane that are late find a queue pair that takes nothing.
//
// A piece is a chain of WRITEs, one a run of its copy plan, and a WRITE with immediate that puts the piece's header and
// trailer (those of TCP's data frames) into one of the slots that the other end keeps for the lane. A reliable queue pair
// places them in this order, so what is announced has landed. Slots are given back by counts in immediates of WRITEs without
// payload: the writer never runs over a slot that was not read, and never into a receive queue without receives.
//
// # Fences
//
// The lease's guard is held at the source from posting to completion, and at the target by the engine on the writer's behalf
// (transfer.Link.OneSided). Abort moves the queue pair to the error state and posts one more send: when
// it and all receives have been flushed, nothing that was posted is under way and nothing that arrives is placed. A writer whose lane fails
// does not let go of the guards before the other end has said that its queue pair is drained too, or lane and channel are gone.
package rdma
