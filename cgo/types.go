package cgo

import (
	"bytes"
	"fmt"
	"net/netip"
	"syscall"
	"unsafe"
)

// WR is one work request of a send queue. It holds no pointer, so that a slice of them goes to C as it is. Memory at Local
// is registered memory, never the Go heap, except for Inline ones, which C copies while it posts them.
type WR struct {
	Local, Remote, ID    uint64
	Len, LKey, RKey, Imm uint32
	Op                   Op
	Flags                Flags
}

// Op is what a work request does.
type Op uint32

// The operations of a send queue. LocalInv invalidates the memory window whose key is RKey.
const (
	Write Op = iota
	WriteImm
	Read
	Send
	SendImm
	LocalInv
)

// Flags modify a work request.
type Flags uint32

// The flags.
const (
	Signaled Flags = 1 << iota
	Fence
	Inline
	Solicited
)

// Recv is one work request of a receive queue.
type Recv struct {
	Local, ID uint64
	Len, LKey uint32
}

// WC is one completion.
type WC struct {
	ID       uint64
	Status   Status
	Op       WCOp // only where Status is Success
	Bytes    uint32
	Imm      uint32
	QPN      uint32
	HasImm   uint32
	Vendor   uint32
	reserved uint32
}

// WCOp says what was completed.
type WCOp uint32

// What can be completed.
const (
	WCOther WCOp = iota
	WCWrite
	WCRead
	WCSend
	WCRecv
	WCRecvWrite // a WriteImm of the other end
	WCBindMW
	WCLocalInv
)

// Status is how a work request ended; all but Success are errors.
type Status uint32

// The statuses that callers tell apart.
const (
	Success       Status = 0
	Flushed       Status = 5
	BindFailed    Status = 6 // of a memory window
	RemoteAccess  Status = 10
	RetryExceeded Status = 12
	RNRExceeded   Status = 13
)

var statusNames = [...]string{
	"success", "local length error", "local QP operation error", "local EE context operation error", "local protection error",
	"flushed", "memory window bind error", "bad response", "local access error", "remote invalid request", "remote access error",
	"remote operation error", "transport retries exceeded", "receiver-not-ready retries exceeded", "local RDD violation",
	"remote invalid RD request", "remote aborted", "invalid EE context number", "invalid EE context state", "fatal error",
	"response timeout", "general error",
}

// Error implements error.
func (s Status) Error() string {
	if int(s) < len(statusNames) {
		return "work request ended: " + statusNames[s]
	}
	return fmt.Sprintf("work request ended: status %d", uint32(s))
}

// Access is what may be done to registered memory.
type Access uint32

// The rights. RemoteWrite needs LocalWrite.
const (
	LocalWrite  Access = 1
	RemoteWrite Access = 1 << 1
	RemoteRead  Access = 1 << 2
	BindWindow  Access = 1 << 4
)

// DeviceAttr is what a device can do.
type DeviceAttr struct {
	NodeGUID, MaxMRSize                                                   uint64
	MaxQP, MaxQPWR, MaxSGE, MaxCQ, MaxCQE, MaxMR, MaxPD, MaxMW            uint32
	MaxReadsServed, MaxReadsIssued, CapFlags, Ports, VendorID, VendorPart uint32
	firmware                                                              [64]byte
}

// The capability flags that matter here.
const (
	capMW2A = 1 << 23
	capMW2B = 1 << 24
)

// MemoryWindows says whether the device has memory windows of type 2.
func (a *DeviceAttr) MemoryWindows() bool { return a.MaxMW > 0 && a.CapFlags&(capMW2A|capMW2B) != 0 }

// Firmware is the firmware's version.
func (a *DeviceAttr) Firmware() string { return text(a.firmware[:]) }

// PortAttr is the state of a device's port. MTUs are in bytes.
type PortAttr struct {
	State                                                            PortState
	PhysState, MaxMTU, ActiveMTU                                     uint32
	LinkLayer                                                        LinkLayer
	width, speed, LID, SMLID, LMC, GIDs, PKeys, MaxMessage, reserved uint32
}

// PortState is the logical state of a port.
type PortState uint32

// PortActive is the only state in which a port carries traffic.
const (
	PortDown   PortState = 1
	PortInit   PortState = 2
	PortArmed  PortState = 3
	PortActive PortState = 4
)

func (s PortState) String() string {
	if names := [...]string{"nop", "down", "init", "armed", "active", "active-defer"}; int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state %d", uint32(s))
}

// LinkLayer is what a port speaks below RDMA.
type LinkLayer uint32

// The link layers.
const (
	InfiniBand LinkLayer = 1
	Ethernet   LinkLayer = 2
)

func (l LinkLayer) String() string {
	switch l {
	case InfiniBand:
		return "InfiniBand"
	case Ethernet:
		return "Ethernet"
	}
	return "unknown"
}

// RateMbps is the signalling rate of the link; 0 where the device does not say.
func (a *PortAttr) RateMbps() uint64 {
	lanes := map[uint32]uint64{1: 1, 2: 4, 4: 8, 8: 12, 16: 2}[a.width]
	return lanes * map[uint32]uint64{1: 2500, 2: 5000, 4: 10000, 8: 10000, 16: 14000, 32: 25000, 64: 50000, 128: 100000, 256: 200000}[a.speed]
}

// GID is one entry of a port's table of addresses.
type GID struct {
	Addr        [16]byte
	Index, Port uint32
	Type        GIDType
	IfIndex     uint32 // of the network interface, 0 if there is none
}

// GIDType is what an address is used with.
type GIDType uint32

// The types.
const (
	GIDInfiniBand GIDType = iota
	GIDRoCEv1
	GIDRoCEv2
)

func (t GIDType) String() string {
	if names := [...]string{"IB", "RoCE v1", "RoCE v2"}; int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("GID type %d", uint32(t))
}

// Reach is how far RoCE v2 packets to an address get: the farther, the better is the address.
type Reach int

// From no RoCE v2 address at all to an IPv4 address, which every routed network of hosts knows.
const (
	ReachNone Reach = iota
	ReachLink       // no router passes it on
	ReachIPv6
	ReachIPv4
)

// Reach says how far packets to the address get.
func (g *GID) Reach() Reach {
	switch a := netip.AddrFrom16(g.Addr); {
	case g.Type != GIDRoCEv2:
		return ReachNone
	case a.Is4In6():
		return ReachIPv4
	case bytes.HasPrefix(g.Addr[:], []byte{0xfe, 0x80}):
		return ReachLink
	}
	return ReachIPv6
}

// QPCaps are a queue pair's sizes.
type QPCaps struct {
	SendWR, RecvWR, SendSGE, RecvSGE, InlineBytes, reserved uint32
}

// QPAttr is what a transition of a queue pair sets. Which attributes count, QP.To knows.
type QPAttr struct {
	Mask                                                                                    QPMask
	State                                                                                   QPState
	PKeyIndex, Port                                                                         uint32
	Access                                                                                  Access
	PathMTU, DestQPN, RQPSN, SQPSN                                                          uint32 // PathMTU in bytes
	MaxReads, MaxReadsServed, MinRNRTimer, Timeout, RetryCount, RNRRetry                    uint32
	IsGlobal, DLID, ServiceLevel, SrcPathBits, FlowLabel, SGIDIndex, HopLimit, TrafficClass uint32
	reserved                                                                                uint32
	DGID                                                                                    [16]byte
}

// QPMask names attributes of a transition.
type QPMask uint32

// The attributes.
const (
	MaskState          QPMask = 1 << 0
	MaskAccess         QPMask = 1 << 3
	MaskPKeyIndex      QPMask = 1 << 4
	MaskPort           QPMask = 1 << 5
	MaskAddress        QPMask = 1 << 7
	MaskPathMTU        QPMask = 1 << 8
	MaskTimeout        QPMask = 1 << 9
	MaskRetryCount     QPMask = 1 << 10
	MaskRNRRetry       QPMask = 1 << 11
	MaskRQPSN          QPMask = 1 << 12
	MaskMaxReads       QPMask = 1 << 13
	MaskMinRNRTimer    QPMask = 1 << 15
	MaskSQPSN          QPMask = 1 << 16
	MaskMaxReadsServed QPMask = 1 << 17
	MaskDestQPN        QPMask = 1 << 20
)

// QPState is the state of a queue pair.
type QPState uint32

// The states.
const (
	QPReset QPState = iota
	QPInit
	QPRTR
	QPRTS
	QPSQDrained
	QPSQError
	QPError
)

func (s QPState) String() string {
	if names := [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}; int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state %d", uint32(s))
}

// Keys are what names a memory region in work requests: of this end, and of the other.
type Keys struct{ LKey, RKey uint32 }

// AsyncEvent is something that a device says unasked.
type AsyncEvent struct {
	Type      AsyncType
	Port, QPN uint32 // whichever it is about
	reserved  uint32
}

// AsyncType is the kind of an event.
type AsyncType uint32

// The kinds that callers tell apart.
const (
	AsyncQPFatal     AsyncType = 1
	AsyncDeviceFatal AsyncType = 8
	AsyncPortActive  AsyncType = 9
	AsyncPortError   AsyncType = 10
	AsyncGIDChange   AsyncType = 18
)

// Handles counts the objects that exist in this process.
type Handles struct {
	Devices, PDs, MRs, Channels, CQs, QPs, Windows, reserved int64
}

// Total is how many there are.
func (h Handles) Total() int64 {
	return h.Devices + h.PDs + h.MRs + h.Channels + h.CQs + h.QPs + h.Windows
}

// C's structs have the same sizes: lib.c, and field by field backend_cgo.go.
var (
	_ [48]byte  = [unsafe.Sizeof(WR{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(Recv{})]byte{}
	_ [40]byte  = [unsafe.Sizeof(WC{})]byte{}
	_ [136]byte = [unsafe.Sizeof(DeviceAttr{})]byte{}
	_ [56]byte  = [unsafe.Sizeof(PortAttr{})]byte{}
	_ [32]byte  = [unsafe.Sizeof(GID{})]byte{}
	_ [24]byte  = [unsafe.Sizeof(QPCaps{})]byte{}
	_ [112]byte = [unsafe.Sizeof(QPAttr{})]byte{}
	_ [8]byte   = [unsafe.Sizeof(Keys{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(AsyncEvent{})]byte{}
	_ [64]byte  = [unsafe.Sizeof(Handles{})]byte{}
)

func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// fail makes an error of an errno; nil of 0.
func fail(errno syscall.Errno, format string, args ...any) error {
	if errno == 0 {
		return nil
	}
	what := fmt.Sprintf(format, args...)
	if errno == syscall.ENOSYS || errno == syscall.EOPNOTSUPP {
		return fmt.Errorf("%s: %w: %w", what, ErrNotSupported, errno)
	}
	return fmt.Errorf("%s: %w", what, errno)
}
