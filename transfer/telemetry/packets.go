package telemetry

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// packets counts RoCE v2 packets that pass network devices. A device's hardware sends and receives its own past the kernel:
// only soft RoCE's are seen.
type packets struct {
	objs packetsObjects

	mu      sync.Mutex
	devices map[int]func() error // how to detach, by interface
	closed  bool
}

func newPackets() (*packets, error) {
	p := &packets{devices: make(map[int]func() error)}
	if err := loadPacketsObjects(&p.objs, nil); err != nil {
		return nil, fmt.Errorf("load programs: %w", err)
	}
	return p, nil
}

// attach counts what passes a network device, once.
func (p *packets) attach(netdev string) (ifindex int, err error) {
	ifi, err := net.InterfaceByName(netdev)
	if err != nil {
		return 0, fmt.Errorf("find %s: %w", netdev, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return 0, net.ErrClosed
	}
	if p.devices[ifi.Index] != nil {
		return ifi.Index, nil
	}
	detach, err := p.attachTCX(ifi.Index)
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) { // before Linux 6.6
		detach, err = p.attachClsact(ifi.Index)
	}
	if err != nil {
		return 0, fmt.Errorf("attach to %s: %w", netdev, err)
	}
	p.devices[ifi.Index] = detach
	return ifi.Index, nil
}

// attachTCX ends with this process, whatever ends it.
func (p *packets) attachTCX(ifindex int) (detach func() error, err error) {
	out, err := link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: p.objs.RoceOut, Attach: ebpf.AttachTCXEgress})
	if err != nil {
		return nil, err
	}
	in, err := link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: p.objs.RoceIn, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return func() error { return errors.Join(in.Close(), out.Close()) }, nil
}

// filterHandle and filterPriority name our filters, so that a daemon replaces what one that was killed has left behind.
const (
	filterHandle   = 0x6872 // hr
	filterPriority = 47911
	filterName     = "headrace"
)

// attachClsact is for older kernels. The queueing discipline stays: others may have come to use it.
func (p *packets) attachClsact(ifindex int) (detach func() error, err error) {
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	if err := netlink.QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("add clsact: %w", err)
	}
	filter := func(parent uint32, prog *ebpf.Program) *netlink.BpfFilter {
		return &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: ifindex, Parent: parent, Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL},
			Fd:          prog.FD(), Name: filterName, DirectAction: true,
		}
	}
	out, in := filter(netlink.HANDLE_MIN_EGRESS, p.objs.RoceOut), filter(netlink.HANDLE_MIN_INGRESS, p.objs.RoceIn)
	if err := netlink.FilterReplace(out); err != nil {
		return nil, fmt.Errorf("add filter: %w", err)
	}
	if err := netlink.FilterReplace(in); err != nil {
		return nil, errors.Join(fmt.Errorf("add filter: %w", err), netlink.FilterDel(out))
	}
	return func() error {
		err := errors.Join(netlink.FilterDel(in), netlink.FilterDel(out))
		if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) {
			return nil // the device is gone, or somebody took its discipline away
		}
		return err
	}, nil
}

// Close detaches the programs.
func (p *packets) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	var errs []error
	for _, detach := range p.devices {
		errs = append(errs, detach())
	}
	return errors.Join(append(errs, p.objs.Close())...)
}

const (
	egress  = 0
	ingress = 1
)

// queueMeter reads one lane's packets: those to the peer's queue pair and those to this end's.
type queueMeter struct {
	p       *packets
	out, in packetsFlow
}

func (p *packets) meter(ifindex int, peer netip.Addr, num, peerNum uint32) (*queueMeter, error) {
	m := &queueMeter{p: p}
	m.out = packetsFlow{Ifindex: uint32(ifindex), Direction: egress, Qpn: peerNum, Peer: peer.As16()}
	m.in = packetsFlow{Ifindex: uint32(ifindex), Direction: ingress, Qpn: num, Peer: peer.As16()}
	for _, k := range []packetsFlow{m.out, m.in} {
		if err := p.objs.Flows.Put(k, packetsTally{}); err != nil {
			return nil, fmt.Errorf("enter a queue pair: %w", err)
		}
	}
	return m, nil
}

func (m *queueMeter) read() (counts, error) {
	var out, in packetsTally
	if err := errors.Join(m.p.objs.Flows.Lookup(m.out, &out), m.p.objs.Flows.Lookup(m.in, &in)); err != nil {
		return counts{}, fmt.Errorf("read a queue pair's counts: %w", err)
	}
	return counts{
		sentBytes: out.DataBytes, receivedBytes: in.DataBytes, sentPackets: out.Packets, receivedPackets: in.Packets,
		againBytes: out.AgainBytes, againPackets: out.AgainPackets,
	}, nil
}

// last keeps what is counted of the whole device whole: it moves the lane's counts to those of its peer.
func (m *queueMeter) last() (counts, error) {
	c, err := m.read()
	if err != nil {
		return c, err
	}
	var errs []error
	for _, k := range []packetsFlow{m.out, m.in} {
		errs = append(errs, m.p.retire(k))
	}
	return c, errors.Join(errs...)
}

// retire adds a flow to those of its peer that are nobody's. Packets counted in between are lost: the lane is over.
func (p *packets) retire(k packetsFlow) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var own, all packetsTally
	if err := p.objs.Flows.LookupAndDelete(k, &own); err != nil {
		return err
	}
	k.Qpn = 0
	if err := p.objs.Flows.Lookup(k, &all); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	all.add(&own)
	return p.objs.Flows.Put(k, all)
}

func (t *packetsTally) add(o *packetsTally) {
	t.Packets += o.Packets
	t.Bytes += o.Bytes
	t.DataPackets += o.DataPackets
	t.DataBytes += o.DataBytes
	t.Acks += o.Acks
	t.Naks += o.Naks
	t.Other += o.Other
	t.AgainPackets += o.AgainPackets
	t.AgainBytes += o.AgainBytes
}

// device adds up everything that passed a network device.
func (p *packets) device(ifindex int) (out, in packetsTally, err error) {
	var k packetsFlow
	var v packetsTally
	all := p.objs.Flows.Iterate()
	for all.Next(&k, &v) {
		switch {
		case k.Ifindex != uint32(ifindex):
		case k.Direction == egress:
			out.add(&v)
		default:
			in.add(&v)
		}
	}
	return out, in, all.Err()
}
