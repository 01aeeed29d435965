package upstream

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
)

// collect takes all of a leg.
func collect(t *testing.T, l *Leg) (status int, data string, err error) {
	t.Helper()
	for b := range l.C {
		status = max(status, b.Status)
		data += string(b.Data)
		if b.Err != nil {
			err = b.Err
		}
		b.Release()
	}
	l.Close()
	return status, data, err
}

func serve(t *testing.T, cfg Config, h http.HandlerFunc) (*Client, Target, *httptest.Server) {
	t.Helper()
	leaktest.Check(t)
	srv := httptest.NewServer(h)
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = patience
	}
	c := New(cfg)
	t.Cleanup(func() {
		c.Close()
		srv.CloseClientConnections()
		srv.Close()
		if legs, idle := c.Counts(); legs != 0 || idle != 0 {
			t.Errorf("%d legs and %d connections left", legs, idle)
		}
	})
	return c, Target{"w", srv.Listener.Addr().String()}, srv
}

var anyBody = Request{Path: "/v1/completions", RequestID: "r", Body: [][]byte{[]byte(`{"a":`), []byte(`1}`)}}

func TestReuse(t *testing.T) {
	addrs := map[string]int{}
	c, target, srv := serve(t, Config{SilenceTimeout: 1500 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
		addrs[r.RemoteAddr]++
		body, _ := io.ReadAll(r.Body)
		if r.Method != "POST" || r.URL.Path != "/v1/completions" || r.Header.Get("X-Request-Id") != "r" || string(body) != `{"a":1}` {
			t.Errorf("got %s %s %v %s", r.Method, r.URL, r.Header, body)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: 1\n\ndata: 2\n\ndata: cut")
	})
	for i := range 3 {
		status, data, err := collect(t, c.Open(target, anyBody))
		if status != 200 || data != "data: 1\n\ndata: 2\n\n" || err != io.EOF {
			t.Fatalf("got %d %q %v", status, data, err)
		}
		if i == 0 {
			time.Sleep(1600 * time.Millisecond) // longer than the deadline of the last read
		}
	}
	if len(addrs) != 1 {
		t.Errorf("connections: %v", addrs)
	}
	srv.CloseClientConnections() // as a restarted worker would
	for end := time.Now().Add(patience); ; {
		if status, _, err := collect(t, c.Open(target, anyBody)); status == 200 && err == io.EOF {
			break
		} else if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

func TestErrorBody(t *testing.T) {
	c, target, _ := serve(t, Config{}, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "9")
		w.WriteHeader(503)
		_, _ = io.WriteString(w, strings.Repeat("x", 100000))
	})
	l := c.Open(target, anyBody)
	b := <-l.C
	if b.Status != 503 || b.SSE || len(b.Data) != 100000 || b.RetryAfter != 9*time.Second || b.Err != io.EOF {
		t.Errorf("got %d %v, %d bytes, %v, %v", b.Status, b.SSE, len(b.Data), b.RetryAfter, b.Err)
	}
	b.Release()
	l.Close()
}

func TestKinds(t *testing.T) {
	hold := make(chan struct{})
	defer close(hold)
	c, target, _ := serve(t, Config{SilenceTimeout: time.Second, EventBytesMax: 1000}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		switch r.Header.Get("X-Request-Id") {
		case "silent":
			select {
			case <-hold:
			case <-r.Context().Done():
			}
		case "stops":
			_, _ = io.WriteString(w, "data: 1\n\n")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-hold:
			case <-r.Context().Done():
			}
		case "dies":
			_, _ = io.WriteString(w, "data: 1\n\ndata: 2")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		case "long":
			_, _ = io.WriteString(w, strings.Repeat("x", 100000))
		}
	})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := Target{"n", ln.Addr().String()}
	ln.Close()
	for _, tt := range []struct {
		id, data string
		kind     Kind
		at       Target
	}{
		{"silent", "", KindSilent, target}, {"stops", "data: 1\n\n", KindSilent, target}, {"dies", "data: 1\n\n", KindLost, target},
		{"long", "", KindProtocol, target}, {"nobody", "", KindRefused, nobody},
	} {
		_, data, err := collect(t, c.Open(tt.at, Request{Path: "/", RequestID: tt.id}))
		var e *Error
		if !errors.As(err, &e) || e.Kind != tt.kind || data != tt.data {
			t.Errorf("%s: got %q, %v (%+v)", tt.id, data, err, e)
		}
	}
}

// TestClose closes legs at every stage, and finishes those that do not end.
func TestClose(t *testing.T) {
	gone := make(chan struct{}, 100)
	c, target, _ := serve(t, Config{FinishTimeout: 20 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		rc := http.NewResponseController(w)
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, ": hb\n\n"); err != nil || rc.Flush() != nil {
				break
			}
		}
		gone <- struct{}{}
	})
	for i := range 8 {
		l := c.Open(target, anyBody)
		for range i {
			b := <-l.C
			b.Release()
		}
		if i%2 == 0 {
			l.Close()
			l.Close()
		} else {
			l.Finish()
		}
	}
	for range 7 { // the first may not have got to the worker
		<-gone
	}
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if legs, _ := c.Counts(); legs == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("legs are left")
		}
	}
}

// TestPatient has a worker that says nothing for longer than others may, and an answer larger than an event may be.
// TestFinishBehindTheEnd finishes, closes and lingers on legs whose response has ended with more batches than C has room for:
// nobody received them, and the leg's goroutine must not wait for somebody who does.
func TestFinishBehindTheEnd(t *testing.T) {
	for name, end := range map[string]func(*Leg){"Finish": (*Leg).Finish, "Linger": (*Leg).Linger, "Close": (*Leg).Close} {
		t.Run(name, func(t *testing.T) {
			more := make(chan struct{})
			c, target, _ := serve(t, Config{}, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				w.(http.Flusher).Flush()
				for range more {
					_, _ = io.WriteString(w, "data: 1\n\n")
					w.(http.Flusher).Flush()
				}
			})
			l := c.Open(target, anyBody)
			until(t, "the header", func() bool { return len(l.C) == 1 })
			for n := 2; n <= batchesAhead; n++ {
				more <- struct{}{}
				until(t, "an event", func() bool { return len(l.C) == n })
			}
			close(more)
			until(t, "the end of the response", func() bool { legs, _ := c.Counts(); return legs == 0 })
			end(l)
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				c.Close()
			}()
			select {
			case <-closed:
			case <-time.After(10 * time.Second):
				t.Fatal("the leg's goroutine waits for ever")
			}
		})
	}
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func TestPatient(t *testing.T) {
	c, target, _ := serve(t, Config{SilenceTimeout: 1500 * time.Millisecond, EventBytesMax: 1000}, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			if n, _ := io.Copy(io.Discard, r.Body); n != 0 || r.URL.Path != "/health" {
				t.Errorf("got %s and a body of %d bytes", r.URL, n)
			}
			return
		}
		if got := r.Header.Get("Accept"); got != "application/json" {
			t.Errorf("Accept: %s", got)
		}
		<-time.After(2 * time.Second)
		w.Header().Set("Content-Type", "application/x-odd")
		_, _ = io.WriteString(w, strings.Repeat("x", 5000))
	})
	patient := anyBody
	patient.Patient, patient.Accept, patient.WholeBytesMax = true, "application/json", 10000
	l := c.Open(target, patient)
	b := <-l.C
	if b.Status != 200 || len(b.Data) != 5000 || b.ContentType != "application/x-odd" || b.Err != io.EOF {
		t.Errorf("got %d, %d bytes of %s, %v", b.Status, len(b.Data), b.ContentType, b.Err)
	}
	b.Release()
	l.Close()
	if status, _, err := collect(t, c.Open(target, Request{Get: true, Path: "/health"})); status != 200 || err != io.EOF {
		t.Errorf("health: %d, %v", status, err)
	}
	impatient := patient
	impatient.Patient = false
	var e *Error
	if _, _, err := collect(t, c.Open(target, impatient)); !errors.As(err, &e) || e.Kind != KindSilent {
		t.Errorf("behind a patient request on the same connection: %v", err)
	}
}
