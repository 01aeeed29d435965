package doctor

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pauseParam is Ethernet's own flow control, for all priorities at once.
type pauseParam struct{ rx, tx bool }

// pfcState is priority flow control: a bit for each priority that has it.
type pfcState struct{ enabled uint8 }

// checkCongestion looks at what keeps RoCE's packets from being lost, as far as the kernel knows it.
func (h *host) checkCongestion(name string, d *device, p *port) Check {
	const remedy = "RoCE stalls when a switch drops its packets: a priority without loss for it, here and on the switches, and ECN for what it slows down (headrace node --rdma-traffic-class 106: DSCP 26 with ECN)"
	seen := h.lossCounters(d, p)
	if p.netdev == "" {
		return unknown(name, "the port's interface is not known"+seen)
	}
	pfc, pfcErr := h.pfc(p.netdev)
	pause, pauseErr := h.pause(p.netdev)
	ecn := h.ecn(p.netdev)
	switch {
	case pfcErr == nil && pfc.enabled != 0:
		return yes(name, "flow control on "+pfc.String()+ecn+seen)
	case pauseErr == nil && pause.rx && pause.tx:
		return yes(name, "flow control for all priorities at once"+ecn+seen)
	case pfcErr == nil:
		return lacking(name, "no priority has flow control"+ecn+seen, remedy,
			fmt.Sprintf("dcb pfc set dev %[1]s prio-pfc all:off 3:on && dcb app add dev %[1]s dscp-prio 26:3", p.netdev))
	case pauseErr == nil:
		return lacking(name, "no flow control"+ecn+seen, remedy, "ethtool -A "+p.netdev+" rx on tx on")
	}
	c := unknown(name, fmt.Sprintf("the driver of %s tells nothing of flow control%s%s", p.netdev, ecn, seen))
	if !d.soft {
		c.Remedy = remedy
	}
	return c
}

func (s pfcState) String() string {
	var on []string
	for i := range 8 {
		if s.enabled&(1<<i) != 0 {
			on = append(on, strconv.Itoa(i))
		}
	}
	return "priorities " + strings.Join(on, ", ")
}

// ecn says what Mellanox's drivers do about congestion, where they say so.
func (h *host) ecn(netdev string) string {
	on, off := 0, 0
	for _, end := range []string{"roce_np", "roce_rp"} {
		dir := "sys/class/net/" + netdev + "/ecn/" + end + "/enable/"
		for _, prio := range h.list(dir) {
			if h.text(dir+prio) == "1" {
				on++
			} else {
				off++
			}
		}
	}
	switch {
	case on+off == 0:
		return ""
	case off == 0:
		return "; ECN on"
	case on == 0:
		return "; ECN off"
	}
	return "; ECN on some priorities"
}

// lossCounters names what a device has counted of losses and marks, if it has.
func (h *host) lossCounters(d *device, p *port) string {
	var words []string
	dir := fmt.Sprintf("%s%s/ports/%d/hw_counters/", classDir, d.name, p.number)
	for _, c := range []struct{ file, word string }{
		{"np_ecn_marked_roce_packets", "packets marked"}, {"np_cnp_sent", "congestion notices sent"}, {"rp_cnp_handled", "congestion notices received"},
		{"out_of_sequence", "packets out of order"}, {"packet_seq_err", "packets missing"}, {"local_ack_timeout_err", "acknowledgements late"},
		{"out_of_seq_request", "packets out of order"}, {"completer_retry_err", "retries"}, {"retry_exceeded_err", "retries given up"},
	} {
		if n, ok := h.number(dir + c.file); ok && n > 0 {
			words = append(words, fmt.Sprintf("%d %s", n, c.word))
		}
	}
	if len(words) == 0 {
		return ""
	}
	return "; so far " + strings.Join(words, ", ")
}

// ethtoolPause asks an interface's driver about flow control.
func ethtoolPause(netdev string) (p pauseParam, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return p, err
	}
	defer unix.Close(fd)
	const getPause = 0x12 // ETHTOOL_GPAUSEPARAM
	param := struct{ cmd, autoneg, rx, tx uint32 }{cmd: getPause}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&param)}
	if copy(req.name[:], netdev) >= len(req.name) {
		return p, unix.ENAMETOOLONG
	}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); e != 0 {
		return p, e
	}
	return pauseParam{rx: param.rx != 0, tx: param.tx != 0}, nil
}

// Numbers of linux/dcbnl.h.
const (
	dcbCmdIEEEGet = 21
	dcbAttrName   = 1
	dcbAttrIEEE   = 13
	dcbIEEEPFC    = 2
	nestedFlag    = 1 << 15
)

// dcbPFC asks for priority flow control over netlink, as `dcb pfc show` does.
func dcbPFC(netdev string) (s pfcState, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return s, err
	}
	defer unix.Close(fd)
	wait := unix.NsecToTimeval(time.Second.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return s, err
	}
	msg := append([]byte(nil), make([]byte, unix.NLMSG_HDRLEN)...)
	msg = append(msg, unix.AF_UNSPEC, dcbCmdIEEEGet, 0, 0)
	msg = native.AppendUint16(msg, uint16(4+len(netdev)+1))
	msg = native.AppendUint16(msg, dcbAttrName)
	msg = append(append(msg, netdev...), 0)
	for len(msg)%4 != 0 {
		msg = append(msg, 0)
	}
	native.PutUint32(msg, uint32(len(msg)))
	native.PutUint16(msg[4:], unix.RTM_GETDCB)
	native.PutUint16(msg[6:], unix.NLM_F_REQUEST)
	if err := unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return s, err
	}
	answer := make([]byte, os.Getpagesize()*4)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return s, err
	}
	return parsePFC(answer[:n])
}

var errNoPFC = errors.New("the kernel's answer says nothing of priority flow control")

// parsePFC reads the kernel's answer.
func parsePFC(b []byte) (s pfcState, err error) {
	const header, dcbHeader = unix.NLMSG_HDRLEN, 4
	if len(b) < header+dcbHeader {
		return s, errNoPFC
	}
	if native.Uint16(b[4:]) == unix.NLMSG_ERROR {
		if e := -int32(native.Uint32(b[header:])); e != 0 {
			return s, unix.Errno(e)
		}
		return s, errNoPFC
	}
	ieee := attribute(b[header+dcbHeader:], dcbAttrIEEE)
	pfc := attribute(ieee, dcbIEEEPFC) // struct ieee_pfc: capability, enabled, ...
	if len(pfc) < 2 {
		return s, errNoPFC
	}
	return pfcState{enabled: pfc[1]}, nil
}

// attribute finds one of a list of netlink attributes, nil where it is not among them.
func attribute(b []byte, want uint16) []byte {
	for len(b) >= 4 {
		size, kind := int(native.Uint16(b)), native.Uint16(b[2:])&^nestedFlag
		if size < 4 || size > len(b) {
			return nil
		}
		if kind == want {
			return b[4:size]
		}
		b = b[min((size+3)&^3, len(b)):]
	}
	return nil
}
