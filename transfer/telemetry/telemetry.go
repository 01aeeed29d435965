// Package telemetry measures channels from outside: what the kernel and the devices count of a channel's lanes. Where it is
// allowed, eBPF programs count; elsewhere the same figures come from TCP_INFO of the lanes' sockets and from the devices'
// counters. Each figure says which it was, and why. The package knows lanes by their sockets and queue pairs alone.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"

	"github.com/headrace/headrace/transfer"
)

// Mode says which sources may be used.
type Mode string

// The modes. Auto uses eBPF where it is allowed; EBPF refuses to start where it is not.
const (
	Auto   Mode = "auto"
	EBPF   Mode = "ebpf"
	Kernel Mode = "kernel"
	Off    Mode = "off"
)

// ParseMode reads a mode; "" is auto.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case "":
		return Auto, nil
	case Auto, EBPF, Kernel, Off:
		return m, nil
	}
	return "", fmt.Errorf("telemetry %q: choose auto, ebpf, kernel or off", s)
}

// Sources, as Wire.Source names them.
const (
	sourceEBPF   = "ebpf"
	sourceKernel = "kernel"
	sourceMixed  = "mixed"
	sourceNone   = "none"
)

// Config has useful zero values.
type Config struct {
	Mode   Mode
	Cgroup string // whose sockets are counted; this process's own where empty
	// Posts are the addresses, in this process, of the functions through which sampled work is posted and found completed;
	// without them times from posting to completion are not measured.
	Posts  Posts
	Logger *slog.Logger
	sysfs  fs.FS // of tests
}

// Posts are addresses of functions of this program.
type Posts struct{ Post, Poll uintptr }

// Telemetry measures the channels of one engine.
type Telemetry struct {
	cfg     Config
	log     *slog.Logger
	sysfs   fs.FS
	sockets *sockets          // nil: TCP_INFO
	packets *packets          // nil: the devices' counters
	posts   *posts            // nil: not measured
	why     map[string]string // by what: sockets, packets, posts

	mu    sync.Mutex
	rails map[railKey]*rail // seen so far
}

var _ transfer.Observer = (*Telemetry)(nil)

// New attaches what is allowed. With Mode EBPF it fails when something is not that this host's kernel has.
func New(cfg Config) (*Telemetry, error) {
	t := &Telemetry{cfg: cfg, log: cfg.Logger, sysfs: cfg.sysfs, why: make(map[string]string), rails: make(map[railKey]*rail)}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	if t.sysfs == nil {
		t.sysfs = os.DirFS("/sys")
	}
	if cfg.Mode == Kernel || cfg.Mode == Off {
		for _, what := range []string{"sockets", "packets", "posts"} {
			t.why[what] = "telemetry is set to " + string(cfg.Mode)
		}
		return t, nil
	}
	if err := errors.Join(t.attach()); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// attach tries each program. What cannot be attached is replaced by the kernel's own counters, or with Mode EBPF an error.
func (t *Telemetry) attach() error {
	var err error
	var errs []error
	note := func(what string, err error) {
		if err == nil {
			t.why[what] = "eBPF programs are attached"
			return
		}
		c := judge(what, err)
		t.why[what] = c.Reason
		t.log.Info("telemetry without eBPF", "of", what, "reason", c.Reason, "remedy", c.Remedy)
		if t.cfg.Mode == EBPF && !errors.Is(err, errNothing) {
			errs = append(errs, fmt.Errorf("attach eBPF for %s: %w; %s", what, err, c.Remedy))
		}
	}
	t.sockets, err = newSockets(t.cfg.Cgroup)
	note("sockets", err)
	t.packets, err = newPackets()
	note("packets", err)
	t.posts, err = newPosts(t.cfg.Posts)
	note("posts", err)
	return errors.Join(errs...)
}

// errNothing says that there is nothing to attach to, which is no fault of the host's.
var errNothing = errors.New("nothing to attach to")

// Close detaches everything. Gauges are closed before. A nil Telemetry is one that is off.
func (t *Telemetry) Close() error {
	if t == nil {
		return nil
	}
	var errs []error
	if t.posts != nil {
		errs = append(errs, t.posts.Close())
	}
	if t.packets != nil {
		errs = append(errs, t.packets.Close())
	}
	if t.sockets != nil {
		errs = append(errs, t.sockets.Close())
	}
	return errors.Join(errs...)
}

// Listening says whose accepted connections may become lanes: they are counted from their first byte on.
func (t *Telemetry) Listening(l net.Listener) {
	if t == nil || t.sockets == nil || l == nil {
		return
	}
	if err := t.sockets.listening(l); err != nil {
		t.log.Warn("lanes that peers dial are counted by TCP_INFO", "error", err)
	}
}

// Dial connects to a peer over what may become a lane: it is counted from its first byte on.
func (t *Telemetry) Dial(ctx context.Context, addr string) (net.Conn, error) {
	if t.sockets == nil {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}
	var mu sync.Mutex
	var entered []uint64 // more than one where a name has several addresses
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		k, err := t.sockets.watch(c)
		if err != nil {
			t.log.Debug("a lane is measured by TCP_INFO", "error", err)
			return nil
		}
		mu.Lock()
		entered = append(entered, k)
		mu.Unlock()
		return nil
	}}
	conn, err := d.DialContext(ctx, "tcp", addr)
	mu.Lock()
	defer mu.Unlock()
	t.sockets.forget(entered, conn)
	return conn, err
}

// Channel implements transfer.Observer.
func (t *Telemetry) Channel() transfer.Gauge {
	return &gauge{t: t, lanes: make(map[*lane]struct{}), rails: make(map[*rail]counts)}
}
