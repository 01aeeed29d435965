package telemetry

import (
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// tcpInfo reads a lane's counts from its socket.
type tcpInfo struct{ conn syscall.RawConn }

var _ meter = tcpInfo{}

func (m tcpInfo) last() (counts, error) { return m.read() }

func (m tcpInfo) read() (counts, error) {
	var info *unix.TCPInfo
	var err error
	if cerr := m.conn.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); cerr != nil || err != nil {
		return counts{}, fmt.Errorf("read TCP_INFO: %w", errors.Join(cerr, err))
	}
	return counts{
		sentBytes: info.Bytes_sent, receivedBytes: info.Bytes_received, sentPackets: uint64(info.Data_segs_out), receivedPackets: uint64(info.Data_segs_in),
		againBytes: info.Bytes_retrans, againPackets: uint64(info.Total_retrans), rttMicros: float64(info.Rtt),
	}, nil
}
