package transfer_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

// warnings keeps what is logged as a warning.
type warnings struct {
	slog.Handler
	mu    sync.Mutex
	lines []string
}

func (w *warnings) Enabled(context.Context, slog.Level) bool { return true }
func (w *warnings) WithAttrs([]slog.Attr) slog.Handler       { return w }
func (w *warnings) WithGroup(string) slog.Handler            { return w }
func (w *warnings) Handle(_ context.Context, r slog.Record) error {
	if r.Level < slog.LevelWarn {
		return nil
	}
	line := r.Message
	r.Attrs(func(a slog.Attr) bool {
		line += " " + a.String()
		return true
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, line)
	return nil
}

func (w *warnings) about(what string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, line := range w.lines {
		if strings.Contains(line, what) {
			n++
		}
	}
	return n
}

// A peer that cannot be reached is named once for each cause, with what to do, until it can.
func TestPeerOutOfReach(t *testing.T) {
	var mu sync.Mutex
	var fault error
	set := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		fault = err
	}
	said := &warnings{Handler: slog.DiscardHandler}
	pair := transporttest.NewPair(t, tcpFactory, transporttest.Options{Config: func(c *transfer.Config) {
		c.Logger = slog.New(said)
		dial := c.Dial
		if dial == nil {
			dial = func(ctx context.Context, addr string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
			}
		}
		c.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			mu.Lock()
			err := fault
			mu.Unlock()
			if err != nil {
				return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
			}
			return dial(ctx, addr)
		}
	}})
	r := newRand()
	fail := func() {
		t.Helper()
		q := pair.NewRequest(r, 40, 0, time.Minute)
		q.Present(t, nil)
		if ev := pair.P.End(t, q.Ticket.Nonce); !strings.Contains(ev.Reason, "present ticket") {
			t.Errorf("P hears %v %q", ev.Kind, ev.Reason)
		}
	}
	const refused, away = "nobody listens there", "there is no way to that address"
	for _, tt := range []struct {
		err   error
		cause string
	}{{syscall.ECONNREFUSED, refused}, {syscall.EHOSTUNREACH, away}} {
		set(tt.err)
		for range 3 {
			fail()
		}
		if n := said.about(tt.cause); n != 1 {
			t.Errorf("%v: %d warnings: %q", tt.err, n, said.lines)
		}
		peers := pair.P.Engine.Status().Unusable
		if len(peers) != 1 || peers[0].Node != pair.D.Engine.NodeID() || !strings.Contains(peers[0].Reason, tt.cause) || !strings.Contains(peers[0].Reason, "--advertise") {
			t.Errorf("%v: status has %+v", tt.err, peers)
		}
	}
	if peers := pair.P.Engine.Status().Unusable; peers[0].Tries != 6 {
		t.Errorf("%d tries", peers[0].Tries)
	}
	set(nil)
	q := pair.NewRequest(r, 40, 0, time.Minute)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
	if peers := pair.P.Engine.Status().Unusable; len(peers) != 0 {
		t.Errorf("it is reached, and status has %+v", peers)
	}
	pair.P.Engine.DropChannels("test")
	until(t, "the channel is closed", func() bool { return len(pair.P.Engine.Status().Channels) == 0 })
	set(errors.New("strange"))
	fail()
	set(syscall.ECONNREFUSED)
	fail()
	if strange, again := said.about("headrace doctor --peer "+pair.Addr), said.about(refused); strange != 1 || again != 2 {
		t.Errorf("%d warnings of something strange, %d of a refusal: %q", strange, again, said.lines)
	}
}
