package hangup

import (
	"net"
	"sync/atomic"
	"testing"
	"time"
)

const patience = 10 * time.Second

func open(t *testing.T) *Watcher {
	t.Helper()
	w, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		if n := len(w.gone); n != 0 {
			t.Errorf("%d connections are still watched", n)
		}
	})
	return w
}

// pair is both ends of a TCP connection.
func pair(t *testing.T) (client, server net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if client, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close(); _ = server.Close() })
	return client, server
}

func await(t *testing.T, ch <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatal(what)
	}
}

func TestEndsAreHeardOf(t *testing.T) {
	for name, end := range map[string]func(c *net.TCPConn) error{
		"closed":            (*net.TCPConn).Close,
		"half closed":       (*net.TCPConn).CloseWrite,
		"reset":             func(c *net.TCPConn) error { _ = c.SetLinger(0); return c.Close() },
		"closed with bytes": func(c *net.TCPConn) error { _, _ = c.Write(make([]byte, 1000)); return c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			w := open(t)
			client, server := pair(t)
			gone := make(chan struct{})
			if _, err := w.Add(server, func() { close(gone) }); err != nil {
				t.Fatal(err)
			}
			if _, err := client.Write([]byte("hello")); err != nil { // no end
				t.Fatal(err)
			}
			if err := end(client.(*net.TCPConn)); err != nil {
				t.Fatal(err)
			}
			await(t, gone, "nothing was heard")
		})
	}
}

func TestEndBeforeItIsWatchedCounts(t *testing.T) {
	w := open(t)
	client, server := pair(t)
	_ = client.Close()
	gone := make(chan struct{})
	if _, err := w.Add(server, func() { close(gone) }); err != nil {
		t.Fatal(err)
	}
	await(t, gone, "nothing was heard")
}

func TestBytesAndRemovedConnectionsCallNothing(t *testing.T) {
	w := open(t)
	var calls atomic.Int32
	talking, server := pair(t)
	removeTalking, err := w.Add(server, func() { calls.Add(1) })
	if err != nil {
		t.Fatal(err)
	}
	leaving, server2 := pair(t)
	remove, err := w.Add(server2, func() { calls.Add(1) })
	if err != nil {
		t.Fatal(err)
	}
	remove()
	last, server3 := pair(t)
	gone := make(chan struct{})
	if _, err := w.Add(server3, func() { close(gone) }); err != nil {
		t.Fatal(err)
	}
	if _, err := talking.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	_ = leaving.Close()
	_ = last.Close()
	await(t, gone, "nothing was heard") // behind the others' events
	if n := calls.Load(); n != 0 {
		t.Errorf("%d calls", n)
	}
	removeTalking()
}

func TestOtherConnectionsAreRefused(t *testing.T) {
	w := open(t)
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if _, err := w.Add(a, func() {}); err != ErrNotSupported {
		t.Errorf("%v", err)
	}
}
