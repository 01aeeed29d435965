package transfer

import (
	"context"
	"net"
)

// Transport moves pieces of leases between regions. The engine owns leases, landing, fences and fairness; a transport
// owns lanes and how bytes get from one end of a lane to the other.
type Transport interface {
	// Name is the word users know it by: tcp, shm, rdma.
	Name() string
	// Local says that it joins a daemon with itself and nobody else.
	Local() bool
	// Probe answers nil, or why this host cannot use the transport.
	Probe() error
	// Dial and Accept set up the two ends of one channel's lanes. Both return when all lanes are ready to carry pieces, those
	// of a Railed link: when some are. Asked for no lanes, a transport gives a link to be extended.
	Dial(ctx context.Context, s *Setup) (Link, error)
	Accept(ctx context.Context, s *Setup) (Link, error)
	// Close releases what the transport holds beyond its links, which are closed before.
	Close() error
}

// Setup is what a transport is given to set up its end of a channel.
type Setup struct {
	Channel [16]byte // the same at both ends
	Lanes   int      // how many
	Target  Target   // where pieces that arrive on this end are announced
	// Exchange sends local to the other end's transport over the authenticated control connection and returns what that
	// one sent: queue pair numbers, GIDs. At most ExchangeMax bytes. Each end calls it at most once.
	Exchange func(ctx context.Context, local []byte) (remote []byte, err error)
	// DialStream and AcceptStream give authenticated byte streams, one a lane. DialStream is for the dialling end,
	// AcceptStream for the accepting one.
	DialStream   func(ctx context.Context, lane int) (net.Conn, error)
	AcceptStream func(ctx context.Context) (lane int, conn net.Conn, err error)
	// Sending and Receiving choose between direct and staged for each piece, where the transport can do both.
	Sending, Receiving *Chooser
	// LaneDown is to be called once for each lane that fails; Link.Close need not.
	LaneDown func(lane int, err error)
	// Spared says that lanes of another transport carry on where this one has none: it may begin without any.
	Spared bool
	// Tell is Exchange for what changes later: the other end's link hears it (Railed.Hear).
	Tell func(news []byte)
	// RailsChanged is to be called when lanes may be wanted that could not be had before: they are dialled at once.
	RailsChanged func()
	// Observe measures a lane from outside; nil: nobody does. Use Watch.
	Observe func(f Flow) (end func())
	Pauses  *Pauses
}

// ExchangeMax bounds what transports may tell each other while a channel is set up.
const ExchangeMax = 64 << 10

// Waiter is a transport that may be of use later where Probe says that it is not at present: its links begin without lanes
// then, where another transport carries meanwhile.
type Waiter interface {
	Waits() bool
}

// Registrar is a transport whose devices must know a region before they move its bytes.
type Registrar interface {
	// Register makes a region known, and gives the key that a peer's transport needs to write to it, at most RegionKeyMax
	// bytes: BOUND brings it there, as Write.Key.
	Register(r *Region) (key []byte, err error)
	// Unregister is called before the region is unmapped, when all of its leases are fenced.
	Unregister(r *Region) error
}

// Porter is a transport over ports of devices, for status.
type Porter interface {
	// Ports lists every port that was found, with the reason why it is used or not.
	Ports() []PortStatus
}

// RegionKeyMax bounds a region's key.
const RegionKeyMax = 1024

// Railed is a link over several rails, which come and go. Its lanes are replaced when and where there is a rail for them.
type Railed interface {
	Extender
	// Lanes lists those that the set-up made. They have numbers below that of rails or Setup.Lanes, whichever is higher.
	Lanes() []int
	// Wanting is how many more lanes would be of use now. Only the dialling end is asked.
	Wanting() int
	// Rail names the rail that a lane goes over.
	Rail(lane int) string
	// Rails says how the rails are, less what the engine counts by itself.
	Rails() []RailStatus
	// Hear takes what the other end's transport says with Setup.Tell. It must not wait.
	Hear(news []byte) error
}

// Link is one end of a channel's lanes.
type Link interface {
	// Post hands one piece to a lane. It may block until the lane took it. w.Done is called exactly once, from any goroutine,
	// perhaps before Post returns: no byte of the source is read by it after that. A lane is given pieces of one lease
	// at a time, and at most Depth pieces that are not done.
	Post(lane int, w *Write)
	Depth() int
	// Abort puts a lane into its error state: what was posted is flushed, and when Abort returns the lane reads and
	// writes no region any more. LaneDown follows.
	Abort(lane int, cause error)
	// OneSided says that arriving bytes are not guarded piece by piece on this side, so that a fence needs the writer's
	// agreement, or else Abort.
	OneSided() bool
	// Close aborts all lanes and waits for their goroutines.
	Close() error
}
