package telemetry

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// sockets counts what goes through TCP lanes: sock_ops for round trips and retransmissions, cgroup_skb for bytes and packets,
// attached to the cgroup that the daemon's sockets belong to.
type sockets struct {
	objs  socketsObjects
	links []link.Link
	once  sync.Once
	err   error
}

func newSockets(cgroup string) (_ *sockets, err error) {
	if cgroup == "" {
		if cgroup, err = ownCgroup(os.ReadFile); err != nil {
			return nil, err
		}
	}
	s := &sockets{}
	if err := loadSocketsObjects(&s.objs, nil); err != nil {
		return nil, fmt.Errorf("load programs: %w", err)
	}
	for _, p := range []struct {
		prog *ebpf.Program
		at   ebpf.AttachType
	}{{s.objs.LaneEvents, ebpf.AttachCGroupSockOps}, {s.objs.LaneOut, ebpf.AttachCGroupInetEgress}, {s.objs.LaneIn, ebpf.AttachCGroupInetIngress}} {
		x, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: p.at, Program: p.prog})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("attach to cgroup %s: %w", cgroup, err), s.Close())
		}
		s.links = append(s.links, x)
	}
	return s, nil
}

// listening makes what is accepted by l be counted from its first byte on.
func (s *sockets) listening(l net.Listener) error {
	a, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return nil
	}
	if err := s.objs.Ports.Put(uint32(a.Port), uint32(1)); err != nil {
		return fmt.Errorf("enter port %d: %w", a.Port, err)
	}
	return nil
}

// Close detaches the programs.
func (s *sockets) Close() error {
	s.once.Do(func() {
		var errs []error
		for _, l := range s.links {
			errs = append(errs, l.Close())
		}
		s.err = errors.Join(append(errs, s.objs.Close())...)
	})
	return s.err
}

// cookie is what the kernel tells sockets apart by, also when they are closed.
func cookie(c syscall.RawConn) (v uint64, err error) {
	cerr := c.Control(func(fd uintptr) { v, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE) })
	if err = errors.Join(cerr, err); err != nil {
		return 0, fmt.Errorf("ask for a socket's cookie: %w", err)
	}
	return v, nil
}

// watch enters a socket that is not connected yet, and gives its cookie.
func (s *sockets) watch(c syscall.RawConn) (uint64, error) {
	k, err := cookie(c)
	if err != nil {
		return 0, err
	}
	if err := s.objs.Lanes.Update(k, socketsLane{}, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return 0, fmt.Errorf("enter a socket: %w", err)
	}
	return k, nil
}

// forget takes sockets out that did not become conn: those that failed before they sent anything the programs never saw.
func (s *sockets) forget(entered []uint64, conn net.Conn) {
	var kept uint64
	if c, ok := conn.(syscall.Conn); ok {
		if raw, err := c.SyscallConn(); err == nil {
			kept, _ = cookie(raw) // 0, which none has, where it is closed already
		}
	}
	for _, k := range entered {
		if k != kept {
			_ = s.objs.Lanes.Delete(k) // the programs may have done so
		}
	}
}

// meter adopts a socket as a lane. One that was not entered before it was connected is counted by TCP_INFO: without the
// callbacks there would be no retransmissions.
func (s *sockets) meter(c syscall.RawConn) (meter, error) {
	k, err := cookie(c)
	if err != nil {
		return nil, err
	}
	if err := s.objs.Adopted.Put(k, uint32(1)); err != nil {
		return nil, fmt.Errorf("adopt a socket: %w", err)
	}
	m := &socketMeter{s, k}
	if _, err := m.read(); err != nil {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = errors.New("it was connected before the programs knew of it, or is closed")
		}
		return nil, errors.Join(fmt.Errorf("TCP_INFO for this lane: %w", err), s.objs.Adopted.Delete(k))
	}
	return m, nil
}

type socketMeter struct {
	s      *sockets
	cookie uint64
}

func (m *socketMeter) read() (counts, error) {
	var v socketsLane
	if err := m.s.objs.Lanes.Lookup(m.cookie, &v); err != nil {
		return counts{}, fmt.Errorf("read a lane's counts: %w", err)
	}
	return counts{
		sentBytes: v.SentBytes, receivedBytes: v.ReceivedBytes, sentPackets: v.SentPackets, receivedPackets: v.ReceivedPackets,
		againBytes: v.AgainBytes, againPackets: v.AgainPackets, rttMicros: float64(v.RttUs),
	}, nil
}

func (m *socketMeter) last() (counts, error) {
	c, err := m.read()
	if err == nil {
		err = errors.Join(m.s.objs.Lanes.Delete(m.cookie), m.s.objs.Adopted.Delete(m.cookie))
	}
	return c, err
}

// errNoCgroup says that there is no cgroup2 hierarchy to attach to.
var errNoCgroup = errors.New("no cgroup2 file system is mounted")

// ownCgroup finds the folder of this process's cgroup.
func ownCgroup(read func(string) ([]byte, error)) (string, error) {
	b, err := read("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	own := ""
	for line := range strings.Lines(string(b)) {
		if p, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			own = p
		}
	}
	if own == "" {
		return "", errNoCgroup
	}
	if b, err = read("/proc/self/mountinfo"); err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		// 36 35 98:0 /root /mount/point options - type source options: see proc(5)
		before, after, ok := strings.Cut(line, " - ")
		fields := strings.Fields(before)
		if !ok || len(fields) < 5 || !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		rel, err := filepath.Rel(fields[3], own)
		if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
			continue // another part of the hierarchy is mounted there
		}
		return filepath.Join(fields[4], rel), nil
	}
	return "", errNoCgroup
}
