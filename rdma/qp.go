package rdma

import (
	"cmp"

	"github.com/headrace/headrace/cgo"
)

// The transitions of a lane's queue pair, each with the attributes that it sets.

// Waiting for acknowledgements, where Config.AckTimeout says nothing: 4.096 us * 2^14 = 67 ms, eight times; soft RoCE takes seven retries for any number (its
// completer in drivers/infiniband/sw/rxe), so there a lane's end is the set-up's deadline or watchStalls. A receiver that is not ready is asked again after
// 0.64 ms, without end: its process is alive as long as its queue pair is, and slots keep that from happening at all.
const (
	ackTimeout  = 14
	ackRetries  = 7
	rnrTimer    = 12
	rnrRetries  = 7
	readsMax    = 16
	hopLimit    = 64
	remoteRight = cgo.LocalWrite | cgo.RemoteWrite | cgo.RemoteRead | cgo.BindWindow
)

func (x *lane) toInit() error {
	return x.qp.To(cgo.QPInit, cgo.QPAttr{PKeyIndex: uint32(x.at.port.pkey.index), Port: uint32(x.rail.port), Access: remoteRight})
}

// toRTR makes the queue pair ready to receive from the peer's.
func (x *lane) toRTR() error {
	a := &cgo.QPAttr{
		Port: uint32(x.rail.port), PathMTU: min(x.at.state.ActiveMTU, x.peer.mtu), DestQPN: x.peer.qpn, RQPSN: x.peer.psn,
		MaxReadsServed: min(readsMax, x.rail.attr.MaxReadsServed), MinRNRTimer: rnrTimer,
	}
	route(a, &x.at, &x.peer, &x.link.t.cfg)
	return x.qp.To(cgo.QPRTR, *a)
}

// route says by what packets find the other end. On Ethernet that is its GID. On InfiniBand it is its LID; the GID goes along
// only where something needs it: a router between two subnets, or a traffic class.
func route(a *cgo.QPAttr, own *standing, peer *hello, cfg *Config) {
	a.ServiceLevel, a.DLID = uint32(cfg.ServiceLevel), peer.lid
	foreign := [8]byte(own.gid.Addr[:8]) != [8]byte(peer.gid[:8])
	if own.state.LinkLayer == cgo.Ethernet || peer.lid == 0 || foreign || cfg.TrafficClass != 0 {
		a.IsGlobal, a.DGID, a.SGIDIndex, a.HopLimit, a.TrafficClass = 1, peer.gid, own.gid.Index, hopLimit, uint32(cfg.TrafficClass)
	}
}

// toRTS makes it ready to send too.
func (x *lane) toRTS() error {
	return x.qp.To(cgo.QPRTS, cgo.QPAttr{
		Timeout: uint32(cmp.Or(x.link.t.cfg.AckTimeout, ackTimeout)), RetryCount: ackRetries, RNRRetry: rnrRetries, SQPSN: x.psn,
		MaxReads: min(readsMax, x.rail.attr.MaxReadsIssued),
	})
}

// toError flushes what was posted, and lets nothing in.
func (x *lane) toError() error {
	return x.qp.To(cgo.QPError, cgo.QPAttr{})
}
