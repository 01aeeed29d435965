package transfer

import (
	"net/netip"
	"syscall"
)

// Observer measures lanes from outside, by what the kernel and the devices count. Its methods must not wait for a peer.
type Observer interface {
	// Channel begins measuring a channel. Its Gauge is closed when the channel is.
	Channel() Gauge
}

// Gauge is one channel's measurements.
type Gauge interface {
	// Lane begins measuring a lane; end, to be called once before the lane's socket or queue pair is closed, takes the last
	// readings.
	Lane(f Flow) (end func())
	Wire() Wire
	Close()
}

// Flow is what the kernel or a device knows a lane by.
type Flow struct {
	Transport string
	Peer      netip.Addr      // the other end's
	Socket    syscall.RawConn // of a TCP lane
	Queue     *QueuePair      // of an RDMA lane
}

// QueuePair is an RDMA lane's ends.
type QueuePair struct {
	Device   string
	Port     int
	Netdev   string // "" where there is none, as on InfiniBand
	Num      uint32 // this end's
	PeerNum  uint32
	PeerPort netip.Addr // the other end's GID as an address
}

// Wire is what was seen of a channel from outside. Counts are of all lanes since the channel was opened, also of those that
// have ended, and include what was sent more than once.
type Wire struct {
	Source               string  `json:"source"` // ebpf, kernel, mixed or none
	Why                  string  `json:"why"`
	SentBytes            uint64  `json:"sent_bytes"`
	ReceivedBytes        uint64  `json:"received_bytes"`
	SentPackets          uint64  `json:"sent_packets"`
	ReceivedPackets      uint64  `json:"received_packets"`
	RetransmittedBytes   uint64  `json:"retransmitted_bytes"`
	RetransmittedPackets uint64  `json:"retransmitted_packets"`
	RTTMicros            float64 `json:"rtt_us"` // smoothed, the mean of lanes that have one; 0: none
	// Rails says that packets, bytes and retransmissions are those of the channel's rails, which other channels use too.
	Rails bool `json:"of_whole_rails,omitempty"`
}

// unobserved is the gauge of an engine without an Observer.
type unobserved struct{}

func (unobserved) Lane(Flow) func() { return func() {} }
func (unobserved) Wire() Wire {
	return Wire{Source: "none", Why: "this daemon measures nothing from outside"}
}
func (unobserved) Close() {}

func (e *Engine) newGauge() Gauge {
	if e.cfg.Observer == nil {
		return unobserved{}
	}
	return e.cfg.Observer.Channel()
}

// Watch begins measuring a lane, where anybody measures; end is never nil.
func (s *Setup) Watch(f Flow) (end func()) {
	if s.Observe == nil {
		return func() {}
	}
	return s.Observe(f)
}
