package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
	"golang.org/x/sys/unix"
)

// conn is one engine's connection. Its reader (serve) works requests off in order, except those that wait for a fence;
// its writer drains the queue.
type conn struct {
	s       *server
	uc      *net.UnixConn
	cred    *unix.Ucred
	id      string
	version uint8
	out     *queue
	client  *transfer.Client
	slots   chan struct{} // requests that wait for a fence
	waiting sync.WaitGroup
	heard   atomic.Bool // a frame came since the last look
	ring    atomic.Pointer[engineRing]
	events  atomic.Uint32 // sent
	subs    submissions
	about   atomic.Pointer[json.RawMessage]
	member  atomic.Pointer[string] // the engine that it is a rank of
	once    sync.Once
	why     atomic.Pointer[wire.Error] // why the daemon ended the connection
	gone    chan struct{}              // closed when the engine is fenced and its id is free
}

func (s *server) serve(uc *net.UnixConn) {
	defer uc.Close()
	c := &conn{s: s, uc: uc, version: uint8(wire.VersionMax), gone: make(chan struct{}), slots: make(chan struct{}, s.cfg.MaxInflight),
		out: newQueue(s.cfg.EventFrames, s.cfg.EventBytes)}
	reader := wire.NewReader(uc)
	silence, err := c.attach(reader)
	<-s.pending
	if err != nil {
		s.log.Warn("engine refused", "engine", c.id, "err", err)
		return
	}
	s.log.Info("engine attached", "engine", c.id, "pid", c.cred.Pid, "uid", c.cred.Uid)
	written := make(chan struct{})
	go func() {
		defer close(written)
		if err := c.out.drain(uc); err != nil {
			c.end(wire.Errorf(wire.CodeSlow, "write to the engine: %v", err), false)
		}
	}()
	stop := make(chan struct{})
	go c.watch(silence, stop)
	readErr := c.read(reader)
	close(stop)
	c.close(readErr)
	<-written
}

// attach answers HELLO. On an error the engine has been told.
func (c *conn) attach(reader *wire.Reader) (silence time.Duration, err error) {
	refuse := func(request uint64, e *wire.Error) error {
		frame, _ := wire.AppendFrame(nil, uint8(wire.VersionMax), 0, request, e)
		hurry(c.uc, c.s.cfg.FlushTimeout)
		_, _ = c.uc.Write(frame)
		return e
	}
	if c.cred, err = checkPeer(c.uc, c.s.cfg.AllowUIDs); err != nil {
		return 0, refuse(0, wire.Errorf(wire.CodeDenied, "%v", err))
	}
	_ = c.uc.SetReadDeadline(time.Now().Add(c.s.cfg.HelloTimeout))
	stop := context.AfterFunc(c.s.ctx, func() { _ = c.uc.SetReadDeadline(time.Unix(1, 0)) })
	f, err := reader.Read()
	if !stop() {
		return 0, refuse(0, wire.Errorf(wire.CodeShutdown, "the daemon is stopping"))
	}
	_ = c.uc.SetReadDeadline(time.Time{}) // from here on end sets it
	if err != nil {
		var e *wire.Error
		if errors.As(err, &e) {
			return 0, refuse(0, e)
		}
		return 0, fmt.Errorf("read HELLO: %w", err)
	}
	defer f.Close()
	hello, e := parseHello(f)
	if e != nil {
		return 0, refuse(f.Request, e)
	}
	c.id = hello.EngineID
	c.version = uint8(min(hello.VersionMax, wire.VersionMax))
	ok, err := c.frame(f.Request, wire.HelloOK{
		Version: uint16(c.version), PID: uint32(os.Getpid()), Epoch: c.s.eng.Epoch(), MaxPayload: wire.MaxPayload,
		MaxInflight: uint32(c.s.cfg.MaxInflight), PingMS: uint32(c.s.cfg.PingInterval.Milliseconds()),
		SilenceMS: uint32(c.s.cfg.Silence.Milliseconds()), NodeID: c.s.eng.NodeID(), DataAddr: c.s.eng.DataAddr()})
	if err != nil {
		return 0, refuse(f.Request, refusal(err))
	}
	c.out.push(ok) // before Attach, whose first event may follow at once
	if err := c.s.add(c); err != nil {
		return 0, refuse(f.Request, refusal(err))
	}
	return time.Duration(hello.SilenceMS) * time.Millisecond, nil
}

func parseHello(f *wire.Frame) (wire.Hello, *wire.Error) {
	if f.Type != wire.TypeHello {
		return wire.Hello{}, wire.Errorf(wire.CodeState, "first message is %s, want HELLO", f.Type)
	}
	if f.FD >= 0 || len(f.FDs) > 0 || f.FDFault != "" {
		return wire.Hello{}, wire.Errorf(wire.CodeDescriptor, "descriptors came with HELLO, which carries none")
	}
	if v, ok := wire.HelloVersions(f.Payload); ok && (v.Min > wire.VersionMax || v.Max < wire.VersionMin || v.Min > v.Max) {
		return wire.Hello{}, wire.Errorf(wire.CodeVersion, "this daemon speaks versions %d to %d of the protocol with engines, the engine %d to %d: upgrade the %s",
			wire.VersionMin, wire.VersionMax, v.Min, v.Max, map[bool]string{true: "daemon", false: "engine"}[v.Max > wire.VersionMax])
	}
	m, err := wire.Parse(wire.TypeHello, f.Payload)
	if err != nil {
		return wire.Hello{}, refusal(err)
	}
	return m.(wire.Hello), nil
}

func (c *conn) read(reader *wire.Reader) error {
	for {
		f, err := reader.Read()
		if err != nil {
			return err
		}
		c.heard.Store(true)
		c.handle(f)
		f.Close()
	}
}

// close ends the connection from its reader: fence first, then free the id, and give the writer a last moment.
func (c *conn) close(readErr error) {
	var e *wire.Error
	if errors.As(readErr, &e) {
		c.end(e, false)
	}
	c.once.Do(func() {}) // the engine left by itself: what comes now is no reason any more
	start := time.Now()
	err := c.client.Close()
	c.waiting.Wait()
	if r := c.ring.Load(); r != nil {
		r.close()
	}
	c.s.remove(c)
	close(c.gone)
	switch why := c.why.Load(); {
	case why != nil:
		c.finish(why, false)
		c.s.log.Warn("engine disconnected", "engine", c.id, "code", why.Code, "why", why.Text, "fenced", time.Since(start), "err", err)
	default:
		c.out.finish(nil, true)
		hurry(c.uc, 0)
		if errors.Is(readErr, io.EOF) || errors.Is(readErr, net.ErrClosed) {
			readErr = nil
		}
		c.s.log.Info("engine left", "engine", c.id, "fenced", time.Since(start), "err", errors.Join(readErr, err))
	}
}

// end makes the reader stop; close, which it then calls, does the rest. An overflowing engine loses what waits for it.
func (c *conn) end(why *wire.Error, discard bool) {
	c.once.Do(func() {
		c.why.Store(why)
		if discard {
			c.finish(why, true)
		}
		_ = c.uc.SetReadDeadline(time.Unix(1, 0))
	})
}

func (c *conn) finish(why *wire.Error, discard bool) {
	goodbye, _ := c.frame(0, wire.Event{Kind: wire.TypeGoodbye, Code: uint16(why.Code), Text: why.Text})
	c.out.finish(goodbye, discard)
	hurry(c.uc, c.s.cfg.FlushTimeout)
}

// watch ends the connection of an engine that asked to be given up after so much silence. It counts its own ticks
// rather than time, so that the daemon's own stop is not taken for the engine's.
func (c *conn) watch(silence time.Duration, stop <-chan struct{}) {
	if silence <= 0 {
		return
	}
	const parts = 5
	t := time.NewTicker(max(silence/parts, time.Millisecond))
	defer t.Stop()
	for quiet := 0; ; {
		select {
		case <-stop:
			return
		case <-t.C:
		}
		if c.heard.Swap(false) {
			quiet = 0
		} else if quiet++; quiet >= parts {
			c.end(wire.Errorf(wire.CodeSlow, "nothing came from the engine for %v", silence), false)
			return
		}
	}
}

func (c *conn) frame(request uint64, m wire.Message) ([]byte, error) {
	return wire.AppendFrame(nil, c.version, 0, request, m)
}

func (c *conn) send(request uint64, m wire.Message) {
	frame, err := c.frame(request, m)
	if err != nil {
		c.s.log.Error("cannot encode for engine", "engine", c.id, "type", m.Type(), "err", err)
		if frame, err = c.frame(request, refusal(err)); err != nil {
			return
		}
	}
	if _, overflow := c.out.push(frame); overflow {
		c.end(wire.Errorf(wire.CodeSlow, "more than %d messages or %d bytes wait to be read by the engine", c.s.cfg.EventFrames, c.s.cfg.EventBytes), true)
	}
}

// event is called by the transfer engine and must not block.
func (c *conn) event(ev transfer.Event) {
	if r := c.ring.Load(); r != nil && ev.Kind == transfer.EventPushed && r.pushed(&ev) {
		return
	}
	w, err := toWire(ev)
	if err != nil {
		c.s.log.Error("cannot encode event", "engine", c.id, "event", ev.Kind, "err", err)
		return
	}
	c.events.Add(1) // before it is sent: a completion that says so may be seen first
	c.send(0, w)
}

// shutdown ends the connection because the daemon stops.
func (c *conn) shutdown() {
	c.end(wire.Errorf(wire.CodeShutdown, "the daemon is stopping"), false)
}
