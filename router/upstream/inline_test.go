package upstream

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

const patience = 10 * time.Second

// take takes all of an inline leg.
func take(t *testing.T, l *Leg) (status int, data string, err error) {
	t.Helper()
	for {
		b, ok := l.Next(time.Now().Add(patience))
		if !ok {
			t.Fatal("nothing came")
		}
		status = max(status, b.Status)
		data += string(b.Data)
		if err = b.Err; err != nil {
			b.Release()
			l.Close()
			return status, data, err
		}
	}
}

// played is a worker that reads a request and sends the parts of an answer, each when it is told to.
func played(t *testing.T, parts ...string) (*Client, Target, chan<- struct{}) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	next, done := make(chan struct{}, len(parts)), make(chan struct{})
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		var b [4096]byte
		if _, err := c.Read(b[:]); err != nil {
			return
		}
		for _, part := range parts {
			<-next
			if _, err := io.WriteString(c, part); err != nil {
				return
			}
		}
		_, _ = c.Read(b[:]) // until the client is done
	}()
	c := New(Config{DialTimeout: patience})
	t.Cleanup(func() {
		c.Close()
		_ = ln.Close()
		<-done
		if legs, idle := c.Counts(); legs != 0 || idle != 0 {
			t.Errorf("%d legs and %d connections left", legs, idle)
		}
	})
	return c, Target{"w", ln.Addr().String()}, next
}

func TestInlineReuses(t *testing.T) {
	addrs := map[string]bool{}
	c, target, _ := serve(t, Config{}, func(w http.ResponseWriter, r *http.Request) {
		addrs[r.RemoteAddr] = true
		body, _ := io.ReadAll(r.Body)
		if r.Method != "POST" || string(body) != `{"a":1}` {
			t.Errorf("got %s %s", r.Method, body)
		}
		if r.URL.Path == "/whole" {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"ok":true}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: 1\n\ndata: 2\n\ndata: cut")
	})
	for i := range 4 {
		r, want := anyBody, "data: 1\n\ndata: 2\n\n"
		if i%2 == 1 {
			r.Path, want = "/whole", `{"ok":true}`
		}
		if status, data, err := take(t, c.OpenInline(target, r)); status != 200 || data != want || err != io.EOF {
			t.Fatalf("got %d %q %v", status, data, err)
		}
	}
	// A leg with a goroutine takes the same connection, and one that is finished leaves it for others.
	if status, _, err := collect(t, c.Open(target, anyBody)); status != 200 || err != io.EOF {
		t.Fatalf("got %d %v", status, err)
	}
	l := c.OpenInline(target, anyBody)
	if b, ok := l.Next(time.Now().Add(patience)); !ok || b.Status != 200 {
		t.Fatalf("got %+v", b)
	}
	l.Finish()
	l.Finish()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if legs, idle := c.Counts(); legs == 0 && idle == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the finished leg's connection is not idle")
		}
	}
	if len(addrs) != 1 {
		t.Errorf("connections: %v", addrs)
	}
}

// TestInlineGoesOnWhereItWaited: an answer that pauses at any byte is read as one that does not.
func TestInlineGoesOnWhereItWaited(t *testing.T) {
	for name, answer := range map[string]string{
		"chunks": "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n9;x=y\r\ndata: 2\n\n\r\n0\r\nA: b\r\n\r\n",
		"length": "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 18\r\n\r\ndata: 1\n\ndata: 2\n\n",
	} {
		t.Run(name, func(t *testing.T) {
			for cut := 1; cut < len(answer); cut++ {
				func() {
					c, target, next := played(t, answer[:cut], answer[cut:])
					l := c.OpenInline(target, anyBody)
					defer l.Close()
					next <- struct{}{}
					var data strings.Builder
					for paused := false; ; {
						wait := time.Millisecond
						if paused {
							wait = patience
						}
						b, ok := l.Next(time.Now().Add(wait))
						data.Write(b.Data)
						if !ok {
							if paused {
								t.Fatalf("cut at %d: nothing came", cut)
							}
							paused = true
							next <- struct{}{}
							continue
						}
						if b.Err != nil {
							if b.Err != io.EOF || data.String() != "data: 1\n\ndata: 2\n\n" {
								t.Fatalf("cut at %d: %q, %v", cut, data.String(), b.Err)
							}
							if !paused {
								next <- struct{}{} // it took less than a millisecond, which does not happen
							}
							return
						}
					}
				}()
			}
		})
	}
}

func TestInlineFailures(t *testing.T) {
	kindOf := func(err error) Kind {
		var e *Error
		if !errors.As(err, &e) {
			return ""
		}
		return e.Kind
	}
	for name, row := range map[string]struct {
		answer string
		want   Kind
	}{
		"no HTTP":     {"what?\r\n\r\n", KindProtocol},
		"bad chunk":   {"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", KindProtocol},
		"long header": {"HTTP/1.1 200 OK\r\nA: " + strings.Repeat("x", readBufferBytes), KindProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			c, target, next := played(t, row.answer)
			next <- struct{}{}
			if _, _, err := take(t, c.OpenInline(target, anyBody)); kindOf(err) != row.want {
				t.Errorf("%v", err)
			}
		})
	}
	t.Run("nobody there", func(t *testing.T) {
		c := New(Config{})
		defer c.Close()
		if _, _, err := take(t, c.OpenInline(Target{"w", "127.0.0.1:1"}, anyBody)); kindOf(err) != KindRefused {
			t.Errorf("%v", err)
		}
	})
	t.Run("lost", func(t *testing.T) {
		c, target, srv := serve(t, Config{}, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, "data: 1\n\ndata: cut")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		})
		_ = srv
		if _, data, err := take(t, c.OpenInline(target, anyBody)); kindOf(err) != KindLost || data != "data: 1\n\n" {
			t.Errorf("%q %v", data, err)
		}
	})
	t.Run("aborted", func(t *testing.T) {
		c, target, next := played(t, "")
		l := c.OpenInline(target, anyBody)
		next <- struct{}{}
		if _, ok := l.Next(time.Now().Add(time.Millisecond)); ok {
			t.Error("something came")
		}
		go l.Abort()
		if _, _, err := take(t, l); kindOf(err) != KindClosed {
			t.Errorf("%v", err)
		}
	})
	t.Run("closed client", func(t *testing.T) {
		c, target, _ := played(t)
		l := c.OpenInline(target, anyBody)
		go c.Close()
		for { // a request that was sent before the client closed waits in vain
			b, ok := l.Next(time.Now().Add(5 * time.Millisecond))
			if ok && kindOf(b.Err) == KindClosed {
				break
			}
		}
		l.Close()
	})
}

// TestInlineAsksAfterAWorkerThatReadsNothing: who waits is told that time passes while the request is still being sent, too.
func TestInlineAsksAfterAWorkerThatReadsNothing(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c := New(Config{})
	defer c.Close()
	r := anyBody
	r.Body = [][]byte{make([]byte, 64<<20)} // more than any socket holds
	l := c.OpenInline(Target{"w", ln.Addr().String()}, r)
	for range 3 {
		if b, ok := l.Next(time.Now().Add(time.Millisecond)); ok {
			t.Fatalf("got %+v", b)
		}
	}
	l.Close()
}

const answerOf2 = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

// TestInterrupt holds that a Next that waits returns, that the one behind it waits again, and that an interruption that comes
// too late does no harm to the connection's next request.
func TestInterrupt(t *testing.T) {
	c, target, next := played(t, answerOf2)
	l := c.OpenInline(target, anyBody)
	for range 3 {
		go l.Interrupt(false) // with all it might end the dialling
		if b, ok := l.Next(time.Now().Add(patience)); ok {
			t.Fatalf("got %+v", b)
		}
	}
	next <- struct{}{}
	if status, data, err := take(t, l); status != 200 || data != "ok" || err != io.EOF || !l.Headed() || !l.Sent() {
		t.Errorf("got %d %q %v", status, data, err)
	}
	l.Interrupt(true) // nothing is there any more
}

// TestInterruptLeavesNoDeadline interrupts a leg whose answer is on its way: the connection serves the next request.
func TestInterruptLeavesNoDeadline(t *testing.T) {
	addrs := map[string]int{}
	c, target, _ := serve(t, Config{}, func(w http.ResponseWriter, r *http.Request) {
		addrs[r.RemoteAddr]++
		_, _ = io.WriteString(w, "ok")
	})
	for range 20 {
		l := c.OpenInline(target, anyBody)
		done := make(chan struct{})
		go func() {
			defer close(done)
			l.Interrupt(true)
		}()
		for {
			b, ok := l.Next(time.Now().Add(patience))
			if !ok {
				continue
			}
			if b.Release(); b.Err != io.EOF {
				var e *Error
				if !errors.As(b.Err, &e) || e.Kind != KindRefused { // interrupted while it dialled
					t.Fatal(b.Err)
				}
			}
			break
		}
		<-done
		l.Close()
	}
	if len(addrs) > 2 {
		t.Errorf("%d connections", len(addrs))
	}
}

// TestInlineLinger holds that a leg that lingers ends with the first data, and soon where there is none.
func TestInlineLinger(t *testing.T) {
	for _, parts := range [][]string{{"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", "9\r\ndata: 1\n\n\r\n"}, {}} {
		c, target, next := played(t, parts...)
		c.cfg.FinishTimeout = 3 * time.Second // for dialling too
		l := c.OpenInline(target, anyBody)
		l.Linger()
		if !l.Sent() {
			t.Error("the request is not sent")
		}
		for range parts {
			next <- struct{}{}
		}
		until(t, "the leg's end", func() bool { legs, _ := c.Counts(); return legs == 0 })
	}
}
