package router

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/headrace/headrace/router/socket"
)

// asking is a client's connection that a router would watch, and the client's end of it.
func asking(t *testing.T) (*clientConn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close(); _ = server.Close() })
	r := &Router{cfg: Config{IdleTimeout: patience, ReadTimeout: patience, HeaderTimeout: patience}}
	return &clientConn{Conn: socket.New(server), owner: r, watched: true, asks: true}, client
}

// TestADeadlineOfAWaitBeforeEndsNoOther: what was set for the last request's body passes while the next request is waited for.
func TestADeadlineOfAWaitBeforeEndsNoOther(t *testing.T) {
	c, client := asking(t)
	passed := time.Unix(1, 0)
	if err := c.reads.set(passed, 0, c.SetReadDeadline); err != nil {
		t.Fatal(err)
	}
	c.await(false)
	if _, err := client.Write([]byte("P")); err != nil {
		t.Fatal(err)
	}
	var b [8]byte
	if n, err := c.Read(b[:]); n != 1 || err != nil {
		t.Errorf("read %d bytes, %v", n, err)
	}
}

func TestAWaitsOwnDeadlineEndsIt(t *testing.T) {
	for name, armed := range map[string]time.Duration{"none before": 0, "a later one before": time.Hour, "an earlier one before": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			c, _ := asking(t)
			if armed != 0 {
				if err := c.reads.set(time.Now(), armed, c.SetReadDeadline); err != nil {
					t.Fatal(err)
				}
			}
			c.begun, c.limit = time.Now(), 2*time.Millisecond
			var b [8]byte
			if n, err := c.Read(b[:]); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("read %d bytes, %v", n, err)
			}
		})
	}
}
