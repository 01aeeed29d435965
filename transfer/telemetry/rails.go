package telemetry

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/headrace/headrace/transfer"
)

type railKey struct {
	device string
	port   int
}

// rail is a device's port that lanes go through.
type rail struct {
	key     railKey
	netdev  string
	t       *Telemetry
	ifindex int    // where packets are counted, else 0
	source  string // of its counts
	why     string
}

// RailStatus is what is known of a rail as a whole: all that went through it, of whatever channel or program. Of eBPF's
// counts since the first lane on it was opened, of the device's since the device was made.
type RailStatus struct {
	Device   string            `json:"device"`
	Port     int               `json:"port"`
	Netdev   string            `json:"netdev,omitempty"`
	Source   string            `json:"source"`
	Why      string            `json:"why"`
	Sent     Packets           `json:"sent"`
	Received Packets           `json:"received"`
	Counters map[string]uint64 `json:"counters,omitempty"` // the device's own, by the driver's names
}

// Packets are a direction's. What a source does not tell apart is zero.
type Packets struct {
	Packets              uint64 `json:"packets"`
	Bytes                uint64 `json:"bytes"`
	DataPackets          uint64 `json:"data_packets"`
	DataBytes            uint64 `json:"data_bytes"`
	Acks                 uint64 `json:"acks"`
	Naks                 uint64 `json:"naks"`
	Other                uint64 `json:"other"`
	RetransmittedPackets uint64 `json:"retransmitted_packets"`
	RetransmittedBytes   uint64 `json:"retransmitted_bytes"`
}

// rail gives what a queue pair's port is measured by, found out with its first lane.
func (t *Telemetry) rail(q *transfer.QueuePair) *rail {
	k := railKey{q.Device, q.Port}
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.rails[k]; r != nil && (r.netdev == q.Netdev || q.Netdev == "") {
		return r
	}
	r := &rail{key: k, netdev: q.Netdev, t: t, source: sourceKernel}
	t.rails[k] = r
	switch _, err := fs.Stat(t.sysfs, path.Join("class/infiniband", q.Device, "device")); {
	case t.packets == nil:
		r.why = "the device's counters: " + t.why["packets"]
	case err == nil:
		r.why = "the device's counters: its hardware sends and receives past the kernel, where eBPF sees nothing"
	case q.Netdev == "":
		r.why = "the device's counters: it has no network device"
	default:
		if r.ifindex, err = t.packets.attach(q.Netdev); err != nil {
			r.why = "the device's counters: " + err.Error()
			t.log.Warn("packets of a rail are not counted by eBPF", "device", q.Device, "netdev", q.Netdev, "error", err)
			return r
		}
		r.source, r.why = sourceEBPF, "eBPF programs count packets on "+q.Netdev
	}
	return r
}

// newQueueLane finds the best source for a queue pair.
func (t *Telemetry) newQueueLane(f transfer.Flow) *lane {
	r := t.rail(f.Queue)
	l := &lane{source: r.source, why: r.why}
	if r.ifindex != 0 {
		m, err := t.packets.meter(r.ifindex, f.Queue.PeerPort, f.Queue.Num, f.Queue.PeerNum)
		if err == nil {
			l.meter = m
			return t.posting(l, f.Queue.Num)
		}
		l.source, l.why = sourceKernel, "the device's counters: "+err.Error()
	}
	l.rail = r
	return t.posting(l, f.Queue.Num)
}

// posting makes times from posting to completion be measured for a lane.
func (t *Telemetry) posting(l *lane, qpn uint32) *lane {
	if t.posts != nil {
		if err := t.posts.watch(qpn); err != nil {
			t.log.Warn("posts of a lane are not timed", "qp", qpn, "error", err)
		} else {
			l.qpn = qpn
		}
	}
	return l
}

// counts are the rail's own, for lanes that have none.
func (r *rail) counts() (counts, error) {
	s, err := r.status()
	return counts{
		sentBytes: s.Sent.DataBytes, receivedBytes: s.Received.DataBytes, sentPackets: s.Sent.Packets, receivedPackets: s.Received.Packets,
		againBytes: s.Sent.RetransmittedBytes, againPackets: s.Sent.RetransmittedPackets,
	}, err
}

func (r *rail) status() (RailStatus, error) {
	s := RailStatus{Device: r.key.device, Port: r.key.port, Netdev: r.netdev, Source: r.source, Why: r.why}
	var err error
	if s.Counters, err = readCounters(r.t.sysfs, r.key.device, r.key.port); err != nil {
		s.Why += "; " + err.Error()
	}
	if r.ifindex == 0 {
		s.Sent, s.Received = interpret(s.Counters)
		return s, err
	}
	out, in, err := r.t.packets.device(r.ifindex)
	if err != nil {
		return s, err
	}
	s.Sent, s.Received = out.packets(), in.packets()
	return s, nil
}

func (t *packetsTally) packets() Packets {
	return Packets{t.Packets, t.Bytes, t.DataPackets, t.DataBytes, t.Acks, t.Naks, t.Other, t.AgainPackets, t.AgainBytes}
}

// Rails lists the rails that lanes have used.
func (t *Telemetry) Rails() []RailStatus {
	t.mu.Lock()
	rails := make([]*rail, 0, len(t.rails))
	for _, r := range t.rails {
		rails = append(rails, r)
	}
	t.mu.Unlock()
	slices.SortFunc(rails, func(a, b *rail) int {
		return cmp.Or(cmp.Compare(a.key.device, b.key.device), cmp.Compare(a.key.port, b.key.port))
	})
	out := make([]RailStatus, 0, len(rails))
	for _, r := range rails {
		s, _ := r.status() // what could not be read is said in it
		out = append(out, s)
	}
	return out
}

// countersMax bounds what a driver may have.
const countersMax = 256

// readCounters reads a port's counters: those every device has and those of its driver. What is missing is left out.
func readCounters(sysfs fs.FS, device string, port int) (map[string]uint64, error) {
	out := make(map[string]uint64)
	var errs []error
	for _, dir := range []string{"counters", "hw_counters"} {
		at := path.Join("class/infiniband", device, "ports", strconv.Itoa(port), dir)
		files, err := fs.ReadDir(sysfs, at)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, f := range files {
			b, err := fs.ReadFile(sysfs, path.Join(at, f.Name()))
			if err != nil || len(out) == countersMax {
				continue // some are not readable on some devices
			}
			if v, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil && f.Name() != "lifespan" {
				out[f.Name()] = v
			}
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("read counters of %s: %w", device, errors.Join(errs...))
	}
	return out, nil
}

// interpret finds what all drivers count under their own names: the InfiniBand standard's, mlx5's and rxe's. Drivers count
// how often they had to send again, not the packets: the least that it can be.
func interpret(c map[string]uint64) (sent, received Packets) {
	first := func(names ...string) uint64 {
		for _, n := range names {
			if v, ok := c[n]; ok {
				return v
			}
		}
		return 0
	}
	sum := func(names ...string) (v uint64) {
		for _, n := range names {
			v += c[n]
		}
		return v
	}
	sent.Packets, received.Packets = first("port_xmit_packets", "sent_pkts"), first("port_rcv_packets", "rcvd_pkts")
	sent.Bytes, received.Bytes = 4*c["port_xmit_data"], 4*c["port_rcv_data"] // counted in words
	sent.DataBytes, received.DataBytes = sent.Bytes, received.Bytes
	sent.RetransmittedPackets = sum("packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "completer_retry_err")
	received.RetransmittedPackets = c["duplicate_request"]
	received.Naks = sum("packet_seq_err", "rcvd_seq_err", "rcvd_rnr_err")
	return sent, received
}
