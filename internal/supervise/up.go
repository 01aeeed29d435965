package supervise

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
)

// startTimeout bounds the way from the first child to the first request that can be served: a large model is read
// from a slow disk meanwhile.
const startTimeout = 3 * time.Minute

// ErrInterrupted is the answer when the context ended before everything was up.
var ErrInterrupted = errors.New("interrupted before everything was up")

// upper is one run of `headrace up`.
type upper struct {
	o        *Options
	dir      *DataDir
	listener *os.File // the router's, kept open over its restarts
	addr     string   // of listener
	etcd     *registry.Embedded
	etcdErr  <-chan error // nil with an external etcd
	reg      *registry.Registry
	table    *registry.Table
	group    *Group
	layout   *layout
	upgrade  upgradeState
	exits    chan Exit // of children that ended unasked, while starting
	ready    atomic.Bool
	closers  []func() error
	control  control

	mu    sync.Mutex // guards parts: a planner adds and removes some
	parts []part
}

// list is what there is now.
func (u *upper) list() []part {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.parts)
}

// Up starts everything, keeps it running until ctx ends, and stops it in order: router, workers, node daemons, etcd.
func Up(ctx context.Context, o *Options) (err error) {
	if err := o.Validate(); err != nil {
		return err
	}
	u := &upper{o: o, exits: make(chan Exit, partsMax), upgrade: upgradeState{changed: make(chan struct{}, 1)}, control: control{changed: make(chan struct{}, 1)}}
	defer func() {
		for i := len(u.closers) - 1; i >= 0; i-- {
			err = errors.Join(err, u.closers[i]())
		}
	}()
	for _, step := range []func(context.Context) error{u.checkModel, u.openDir, u.listen, u.startEtcd, u.startParts, u.awaitReady} {
		if err := step(ctx); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ErrInterrupted
		}
	}
	return u.run(ctx)
}

// onClose adds what is to be undone at the end, last first.
func (u *upper) onClose(f func() error) { u.closers = append(u.closers, f) }

func (u *upper) progress(format string, args ...any) {
	if u.o.Progress != nil {
		u.o.Progress(fmt.Sprintf(format, args...))
	}
}

// checkModel looks at the first bytes, so that a wrong path is one clear line and not that of a worker.
func (u *upper) checkModel(context.Context) error {
	if u.o.Engine != nil {
		return nil // it knows its models
	}
	path, err := filepath.Abs(u.o.Model)
	if err != nil {
		return fmt.Errorf("open model: %w", err)
	}
	u.o.Model = path
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open model: %w", err)
	}
	defer f.Close()
	var magic [4]byte
	if n, _ := f.Read(magic[:]); n < len(magic) || string(magic[:]) != "GGUF" {
		return fmt.Errorf("open model: %s is no GGUF file", path)
	}
	return nil
}

func (u *upper) openDir(context.Context) (err error) {
	if u.dir, err = OpenDataDir(u.o.DataDir); err != nil {
		return err
	}
	u.onClose(u.dir.Close)
	_, err = config.EnsureKey(u.dir.Key())
	return err
}

// listen opens the port that clients use. It stays open while a router is replaced: clients then wait a moment
// instead of being refused.
func (u *upper) listen(context.Context) error {
	l, err := net.Listen("tcp", u.o.Listen)
	if err != nil {
		return fmt.Errorf("%w; stop what uses it or choose another --listen", err)
	}
	defer l.Close()
	u.addr = l.Addr().String()
	if u.listener, err = l.(*net.TCPListener).File(); err != nil {
		return fmt.Errorf("share the listener: %w", err)
	}
	u.onClose(u.listener.Close)
	return nil
}

func (u *upper) startEtcd(ctx context.Context) (err error) {
	endpoints := u.o.Etcd
	if len(endpoints) == 0 {
		u.etcd, err = registry.StartEmbedded(registry.EmbeddedConfig{
			Dir: u.dir.Etcd(), ClientAddr: "127.0.0.1:0", LogFile: filepath.Join(u.dir.Logs(), "etcd.log"),
		})
		if err != nil {
			return err
		}
		u.onClose(u.etcd.Close)
		u.etcdErr = u.etcd.Err()
		endpoints = []string{u.etcd.Addr()}
	}
	if u.reg, err = registry.Open(ctx, registry.Config{Endpoints: endpoints, Logger: u.o.Logger}); err != nil {
		return err
	}
	u.onClose(u.reg.Close)
	u.o.Etcd = endpoints
	pctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := u.reg.Ping(pctx); err != nil {
		return err
	}
	if u.etcd != nil {
		if err := u.reg.Prune(pctx, deadHere()); err != nil {
			return err
		}
	}
	// The table must outlive ctx: it is what tells that parts have left.
	u.table, err = u.reg.Watch(context.WithoutCancel(ctx))
	return err
}

// deadHere finds entries of this host whose processes are gone: what a killed predecessor left behind.
func deadHere() func(any) bool {
	here, err := os.Hostname()
	return func(entry any) bool {
		var host string
		var pid int
		switch e := entry.(type) {
		case registry.Node:
			host, pid = e.Host, e.PID
		case registry.Worker:
			host, pid = e.Host, e.PID
		case registry.Router:
			host, pid = e.Host, e.PID
		case registry.Planner:
			host, pid = e.Host, e.PID
		}
		return err == nil && host == here && pid > 0 && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	}
}

func (u *upper) startParts(context.Context) (err error) {
	u.group, err = NewGroup(GroupConfig{
		Exe: u.o.Exe, LogDir: u.dir.Logs(), Stream: u.o.LogStream, Logger: u.o.Logger,
		OnExit: func(e Exit) bool {
			select {
			case u.exits <- e:
			default: // more than anybody wants to read
			}
			// One that was killed is started again; one that gives up before it ever worked would only do so again.
			return e.Signalled || u.ready.Load()
		},
	})
	if err != nil {
		return err
	}
	u.onClose(func() error { u.stopParts(); return nil })
	idPrefix := ""
	if u.etcd == nil { // other machines' parts are in this registry too
		if idPrefix, err = os.Hostname(); err != nil {
			return fmt.Errorf("name this machine's parts: %w", err)
		}
		idPrefix += "-"
	}
	u.layout = newLayout(u.o, u.dir, u.o.Etcd, idPrefix)
	u.parts = u.layout.plan(u.listener)
	for _, p := range u.parts {
		if err := u.group.Start(p.spec); err != nil {
			return err
		}
	}
	return nil
}

// stopParts ends the children in the order that lets requests finish: first who takes new ones.
func (u *upper) stopParts() {
	u.control.close() // so that nothing more is started
	for _, kind := range []string{"planner", "router", "worker", "node"} {
		var names []string
		for _, p := range u.list() {
			if p.kind == kind {
				names = append(names, p.spec.Name)
			}
		}
		u.group.Stop(u.o.Hard, names...)
	}
	u.control.stops.Wait()
	if u.o.Planner != nil {
		// An orderly end; behind a kill it stays, and the next planner knows what there was.
		if err := os.Remove(u.dir.Planner()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			u.o.Logger.Warn("remove the planner's state", "err", err)
		}
	}
	u.group.Close()
}

// publishAgain is the pause before a state file that could not be written is tried again.
const publishAgain = time.Second

// run is the time between ready and the end. It keeps the state file true over restarts.
func (u *upper) run(ctx context.Context) error {
	u.ready.Store(true)
	state := u.state()
	if err := u.publish(state); err != nil {
		return err
	}
	if u.o.ReadyFile != "" {
		u.onClose(func() error { return os.Remove(u.o.ReadyFile) })
	}
	if u.o.Ready != nil {
		u.o.Ready(state)
	}
	if u.o.Planner != nil {
		if err := u.startPlanner(state.Model); err != nil {
			return err
		}
	}
	var upgrades sync.WaitGroup
	defer upgrades.Wait()
	last, said := fmt.Sprint(*state), ""
	for {
		changed := u.table.Changed()
		var again <-chan time.Time
		if state := u.state(); fmt.Sprint(*state) != last {
			if err := u.publish(state); err == nil {
				last, said = fmt.Sprint(*state), ""
			} else {
				again = time.After(publishAgain)
				if err.Error() != said {
					said = err.Error()
					u.o.Logger.Warn("state file is out of date; trying on", "err", err)
				}
			}
		}
		select {
		case <-changed:
		case <-again:
		case <-u.exits:
		case <-u.o.Upgrade:
			upgrades.Go(func() { u.rollNodes(ctx) })
		case <-u.upgrade.changed:
		case <-u.control.changed:
		case <-ctx.Done():
			u.progress("stopping; Ctrl-C once more stops at once")
			return nil
		case err := <-u.etcdErr:
			return fmt.Errorf("run etcd: %w", err)
		}
	}
}

func (u *upper) publish(s *State) error {
	err := writeJSON(statePath(u.dir.path), s)
	if u.o.ReadyFile != "" {
		err = errors.Join(err, writeJSON(u.o.ReadyFile, s))
	}
	return err
}

func (u *upper) state() *State {
	url := "http://" + dialable(u.addr)
	s := &State{
		PID: os.Getpid(), URL: url, Endpoint: url + "/v1", Admin: url,
		Etcd: strings.Join(u.o.Etcd, ","), DataDir: u.dir.path, PIDs: u.group.PIDs(), Nodes: map[string]string{},
	}
	s.PIDs["up"] = os.Getpid()
	s.Upgrade = u.upgrade.get()
	view := u.table.Snapshot()
	for _, p := range u.list() {
		switch p.kind {
		case "node":
			if n, ok := view.Node(p.id); ok && n.Admin != "" {
				s.Nodes[p.spec.Name] = "http://" + n.Admin
			}
		case "worker":
			if w, ok := view.Worker(p.id); ok {
				s.Model = w.Model
			}
		case "router":
			if r, ok := view.Router(p.id); ok && r.Admin != "" {
				s.Admin = "http://" + r.Admin
			}
		}
	}
	return s
}

// dialable turns an address to listen on into one to connect to.
func dialable(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsUnspecified() {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return addr
}
