package rdma

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
)

// standing is how a rail is at present.
type standing struct {
	up     bool
	why    string // it is not up
	state  cgo.PortAttr
	gid    cgo.GID
	prefix uint8 // bits of the GID that are the subnet's
	port   port  // all of it
}

// same says whether lanes that were made at one of the two are good at the other.
func (s *standing) same(o *standing) bool {
	return s.up == o.up && s.gid.Addr == o.gid.Addr && s.gid.Index == o.gid.Index && s.state.LID == o.state.LID && s.prefix == o.prefix && s.port.pkey == o.port.pkey
}

// now is how the rail was when it was last looked at.
func (r *rail) now() standing {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.standing
}

// look asks the device how the port is, and gives what has changed if anything has.
func (r *rail) look(cfg *Config) (was, is standing, changed bool) {
	is = r.ask(cfg)
	r.mu.Lock()
	defer r.mu.Unlock()
	was, r.standing = r.standing, is
	return was, is, !was.same(&is)
}

func (r *rail) ask(cfg *Config) (s standing) {
	s.port = *r.found
	s.port.ask(r.dev, cfg, kernelTree)
	s.up, s.state, s.gid, s.prefix = s.port.used, s.port.state, s.port.gid, prefixOf(s.port.gid)
	if s.up {
		s.port.reason = s.port.chosen()
	} else {
		s.why = s.port.reason
	}
	return s
}

// prefixOf is how many bits of a RoCE address are its subnet's, 0 where the host does not say.
func prefixOf(g cgo.GID) uint8 {
	if g.IfIndex == 0 {
		return 0
	}
	i, err := net.InterfaceByIndex(int(g.IfIndex))
	if err != nil {
		return 0
	}
	addrs, err := i.Addrs()
	if err != nil {
		return 0
	}
	want := netip.AddrFrom16(g.Addr).Unmap()
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		if err != nil || p.Addr().Unmap() != want {
			continue
		}
		if want.Is4() {
			return uint8(96 + p.Bits())
		}
		return uint8(p.Bits())
	}
	return 0
}

// info is what the other end is told.
func (r *rail) info() railInfo {
	s := r.now()
	i := railInfo{
		name: r.found.name(), gid: s.gid.Addr, rate: uint32(min(s.state.RateMbps(), 1<<31)), lid: uint16(s.state.LID), layer: s.state.LinkLayer, prefix: s.prefix, up: s.up, numa: r.numa,
	}
	i.name = i.name[:min(len(i.name), railNameField-1)]
	return i
}

func infos(rails []*rail) []railInfo {
	list := make([]railInfo, len(rails))
	for i, r := range rails {
		list[i] = r.info()
	}
	return list
}

// lookAgain is how often a rail is looked at without an event of its port: some drivers lose one.
const lookAgain = time.Second

// watcher reads the events of one rail's device.
type watcher struct {
	file *os.File // a duplicate of the events' descriptor that Go's poller waits for
	raw  syscall.RawConn
	done chan struct{}
}

// watch begins to follow a rail's state.
func (t *transport) watch(r *rail) error {
	fd, err := r.dev.AsyncFD()
	if err != nil {
		return err
	}
	if fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return err
	}
	w := &watcher{file: os.NewFile(uintptr(fd), "rdma events"), done: make(chan struct{})}
	if w.raw, err = w.file.SyscallConn(); err != nil {
		return errors.Join(err, w.file.Close())
	}
	r.watcher = w
	go func() {
		defer close(w.done)
		for w.wait(r) {
			t.check(r)
		}
	}()
	return nil
}

// wait returns when there was an event, or it is time to look without one; false when the watcher is closed.
func (w *watcher) wait(r *rail) bool {
	if err := w.file.SetReadDeadline(time.Now().Add(lookAgain)); err != nil {
		return false
	}
	err := w.raw.Read(func(uintptr) bool {
		got := false
		for {
			if _, err := r.dev.AsyncEvent(); err != nil {
				return got // EAGAIN: that was all
			}
			got = true
		}
	})
	return err == nil || errors.Is(err, os.ErrDeadlineExceeded)
}

func (w *watcher) close() error {
	err := w.file.Close()
	<-w.done
	return err
}

// check looks at a rail, and tells the links what has changed.
func (t *transport) check(r *rail) {
	was, is, changed := r.look(&t.cfg)
	if !changed {
		return
	}
	t.linkMu.Lock()
	links := make([]*link, 0, len(t.links))
	for l := range t.links {
		links = append(links, l)
	}
	t.linkMu.Unlock()
	for _, l := range links {
		l.railChanged(r, &was, &is)
	}
}
