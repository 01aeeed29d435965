package rdma

import (
	"net/netip"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// measure begins measuring a lane from outside, when its ends know each other and before anything is sent.
func (x *lane) measure() {
	x.measured = x.link.setup.Watch(transfer.Flow{Transport: "rdma", Queue: &transfer.QueuePair{
		Device: x.rail.name, Port: x.rail.port, Netdev: x.rail.netdev, Num: x.qp.Num, PeerNum: x.peer.qpn, PeerPort: netip.AddrFrom16(x.peer.gid),
	}})
}

// EntryPoints are the addresses of the functions through which all work is posted and found completed.
func EntryPoints() cgo.Entries { return cgo.EntryPoints() }
