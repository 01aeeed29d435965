package transfer

import "fmt"

// LeaseID names a lease within one daemon's life (its epoch). It is never zero.
type LeaseID uint64

// RegionID names a region within one daemon's life. It is never zero.
type RegionID uint64

// EventKind says what happened to a lease.
type EventKind uint8

// The kinds of events. Every lease a client is told of ends with exactly one of Settled, Ended and Refused.
const (
	// EventPresented (to D): P's daemon presented a ticket made out to this engine. Nonce, Lease, Tokens, Meta, Layouts (P's), PEngine.
	EventPresented EventKind = iota + 1
	// EventBound (to P): D bound the ticket to blocks. FirstToken: earlier KV is already at D, so only units that hold
	// later tokens are wanted (others may be pushed and count as landed at once).
	EventBound
	// EventPushed (to P): every unit of the push with this Seq has landed.
	EventPushed
	// EventSettled (to both): everything landed and the record arrived. D gets Record. P's blocks are no longer read.
	EventSettled
	// EventEnded (to both): revoked, expired or failed, with Reason and State. Sent only after the local fence holds, so
	// that the blocks may be reused. With Lease 0 (to D): the ticket was recalled, and nobody will present it any more.
	EventEnded
	// EventRefused (to P): D, or its daemon, did not take the ticket, with Reason.
	EventRefused
)

var eventNames = [...]string{EventPresented: "presented", EventBound: "bound", EventPushed: "pushed", EventSettled: "settled", EventEnded: "ended", EventRefused: "refused"}

func (k EventKind) String() string {
	if int(k) < len(eventNames) && eventNames[k] != "" {
		return eventNames[k]
	}
	return fmt.Sprintf("event(%d)", uint8(k))
}

// LeaseState is where a lease is in its life: open, bound, then exactly one of settled, revoked and expired.
type LeaseState uint8

// The states of a lease. A lease that fails (its channel died, its region went) is revoked, by the daemon, with the reason.
const (
	LeaseOpen LeaseState = iota + 1
	LeaseBound
	LeaseSettled
	LeaseRevoked
	LeaseExpired
	LeaseMoved // refused, presented to nobody: the daemon gives way, its successor will take the ticket
)

var stateNames = [...]string{LeaseOpen: "open", LeaseBound: "bound", LeaseSettled: "settled", LeaseRevoked: "revoked", LeaseExpired: "expired", LeaseMoved: "moved"}

func (s LeaseState) String() string {
	if int(s) < len(stateNames) && stateNames[s] != "" {
		return stateNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Event tells a client what happened to one of its leases. Which fields are set is said beside the kinds.
type Event struct {
	Kind       EventKind
	State      LeaseState // of the lease, after the event
	Lease      LeaseID
	Nonce      [16]byte // of the ticket
	Seq        uint64
	Tokens     uint32
	FirstToken uint32
	PEngine    string
	Meta       []byte
	Record     []byte
	Layouts    []Layout
	Reason     string
}

// Unit names whole blocks of a request: block indexes [First, First+Count) of the request, in source blocks, of one layer;
// or of AllLayers; of all source regions, or of one.
type Unit struct {
	Layer, First, Count uint32
	Shard               uint32 // 0: all regions of the lease; n: the n-th of them only, counted from 1
}

// PresentReq asks to present a ticket to D's daemon.
type PresentReq struct {
	Ticket  []byte
	Peer    string     // host:port of D's daemon; unused when D's node is this one
	Regions []RegionID // where the source blocks lie: a shard set, one region a tensor-parallel rank, in order of rank
	Tokens  uint32     // of the request, whose KV will be pushed
	Blocks  []uint32   // source block ids in the request's order: block i holds tokens [i*BlockTokens, (i+1)*BlockTokens); the rest by Extend
	Meta    []byte     // opaque to daemons, handed to D's engine with EventPresented
}

// BindReq binds a presented ticket to blocks.
type BindReq struct {
	Ticket     []byte
	Regions    []RegionID // a shard set with a region for every tensor-parallel rank, in order of rank
	FirstToken uint32     // multiple of the regions' BlockTokens: KV before it is already there and is not wanted
	Blocks     []uint32   // destination block ids in the request's order from token 0 on; those before FirstToken are ignored
}

// RegionFlags modify AddRegion.
type RegionFlags uint32

const (
	// RegionReadOnly lends memory to be read from only: it can be a source, never a destination.
	RegionReadOnly RegionFlags = 1 << iota
	// RegionPopulate faults the whole region in, in the background, so that the first transfers do not pay for it.
	RegionPopulate
)
