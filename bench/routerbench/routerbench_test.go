package routerbench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/bench"
	"github.com/headrace/headrace/worker/standin"
)

func TestMain(m *testing.M) {
	MaybeChild()
	os.Exit(m.Run())
}

// TestEverythingIsMeasured runs all parts for a moment: who is not installed is named, nobody fails a request.
func TestEverythingIsMeasured(t *testing.T) {
	r, err := Run(t.Context(), Options{Bodies: []int{1024, 20_000}, Conns: []int{2}, Rounds: 1, Run: 20 * time.Millisecond, Rate: 100, Pace: time.Millisecond, Streams: 8})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 2*2*3+1 || !r.Complete {
		t.Errorf("%d rows", len(r.Rows))
	}
	for _, row := range r.Rows {
		for _, x := range row.All {
			if x.Errors != 0 || !(x.RPS > 0) || !(x.P50 > 0) || !(x.P99 >= x.P50) || row.Part == partPaced && (x.StallP50 < 1000 || x.P50 < 62_000) {
				t.Errorf("%s, %s, %d bytes: %+v", row.Part, row.Kind, row.BodyBytes, x)
			}
		}
		if row.Series(direct) == nil || row.Part == partPairs && row.Series(oursPairs) == nil || row.Part != partPairs && row.Series(ours) == nil {
			t.Errorf("%s lacks somebody: %+v", row.Part, row.All)
		}
	}
	var text, doc, svg bytes.Buffer
	if err := Print(&text, r, false); err != nil || !strings.Contains(text.String(), "requests/s") {
		t.Errorf("%v: %s", err, text.String())
	}
	if err := Print(&doc, r, true); err != nil || !json.Valid(doc.Bytes()) {
		t.Errorf("%v: %s", err, doc.String())
	}
	if err := SVG(&svg, r); err != nil || !strings.Contains(svg.String(), "</svg>") {
		t.Error(err)
	}
}

// Another binary's router is one more contestant, which ours is compared with.
func TestAnotherBinaryIsMeasuredBesideOurs(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := standin.WriteTokenizer(dir); err != nil {
		t.Fatal(err)
	}
	r, err := Run(t.Context(), Options{Parts: []string{partWhole, partExact}, Kinds: []string{kindJSON}, Bodies: []int{20_000}, Conns: []int{2}, Rounds: 1, Run: 20 * time.Millisecond, Rate: 100, Tokenizer: dir, Before: []string{exe}})
	if err != nil {
		t.Fatal(err)
	}
	name := before + filepath.Base(exe)
	for _, row := range r.Rows {
		names := []string{name}
		if row.Part == partExact {
			names = []string{name + ", warm", name + coldEnd}
		}
		for _, name := range names {
			if x := row.Series(name); x == nil || x.Errors != 0 || !(x.RPS > 0) || !(x.Ratio > 0) {
				t.Errorf("%s, %s: %+v", row.Part, name, x)
			}
		}
	}
}

func TestVerdictsTakeTheWorst(t *testing.T) {
	r := &Report{Rows: []Row{
		{Part: partWhole, Kind: kindStream, BodyBytes: 1024, All: []Series{{Name: ours, Ratio: 1}, {Name: nginx, Ratio: 1.2}}},
		{Part: partWhole, Kind: kindStream, BodyBytes: 20480, All: []Series{{Name: ours, Ratio: 1}, {Name: nginx, Ratio: 0.99}}},
		{Part: partWhole, Kind: kindJSON, BodyBytes: 1024, All: []Series{{Name: ours, Ratio: 1}, {Name: nginx, Ratio: 0.91}, {Name: sglang, Ratio: 2.5}}},
		{Part: partOpen, Kind: kindJSON, BodyBytes: 1024, All: []Series{{Name: ours, AddedP50: 100, AddedP99: 2000}, {Name: nginx, AddedP50: 90, AddedP99: 900}}},
	}}
	r.judge()
	want := []struct {
		state string
		value float64
	}{{bench.Fails, 0.99}, {bench.NotMeasured, 0}, {bench.Holds, 0.91}, {bench.Holds, 2.5}, {bench.Holds, 100}, {bench.Fails, 1100}, {bench.NotMeasured, 0}, {bench.NotMeasured, 0}, {bench.NotMeasured, 0}, {bench.NotMeasured, 0}, {bench.Holds, 0}}
	for i, v := range r.Verdicts {
		if v.State != want[i].state || v.Measured != nil && math.Abs(*v.Measured-want[i].value) > 1e-9 {
			t.Errorf("%+v, want %+v", v, want[i])
		}
	}
	if !r.Failed() {
		t.Error("it did not fail")
	}
}

// TestClientKnowsWrongAnswers: a contestant that answers quickly and wrongly must not win.
func TestClientKnowsWrongAnswers(t *testing.T) {
	long := strings.Repeat("x", bodyLeast)
	event := "data: {}\n\n"
	for name, row := range map[string]struct {
		stream bool
		answer string
		good   bool
	}{
		"whole":             {false, "HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n" + long, true},
		"in chunks":         {false, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n384\r\n" + long + "\r\n0\r\n\r\n", true},
		"short":             {false, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", false},
		"refused":           {false, "HTTP/1.1 503 Busy\r\nContent-Length: 900\r\n\r\n" + long, false},
		"without a length":  {false, "HTTP/1.1 200 OK\r\n\r\n", false},
		"cut":               {false, "HTTP/1.1 200 OK\r\nContent-Length: 901\r\n\r\n" + long, false},
		"stream":            {true, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n280\r\n" + strings.Repeat(event, 64) + "\r\n0\r\n\r\n", true},
		"stream with a gap": {true, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n276\r\n" + strings.Repeat(event, 63) + "\r\n0\r\n\r\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			c := &client{addr: answering(t, row.answer), sent: [][]byte{[]byte("x")}, stream: row.stream}
			once(t, c)
			if c.errors > 1 || (c.err == nil) != row.good || len(c.took)+c.errors != 1 {
				t.Errorf("%d answers, %d errors, %v", len(c.took), c.errors, c.err)
			}
		})
	}
}

// answering answers whatever comes first over a connection, and closes it.
func answering(t *testing.T, answer string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			var b [1024]byte
			_, _ = c.Read(b[:])
			_, _ = io.WriteString(c, answer)
			_ = c.Close()
		}
	}()
	return l.Addr().String()
}

// once has clients ask once.
func once(t *testing.T, clients ...*client) {
	l, err := newLoop(clients, 0)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	if err := errors.Join(l.run(t.Context(), now, now), l.close()); err != nil {
		t.Fatal(err)
	}
}

// Requests that one write does not take go on when there is room, and those of other clients meanwhile.
func TestLongRequests(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const size = 16 << 20 // more than sockets hold
	defer l.Close()
	got := make(chan int64, 2)
	go func() {
		var conns []net.Conn
		for range cap(got) {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			conns = append(conns, c)
		}
		for _, c := range conns { // one behind the other
			n, _ := io.CopyN(io.Discard, c, size)
			got <- n
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n"+strings.Repeat("x", bodyLeast))
		}
	}()
	clients := make([]*client, cap(got))
	for i := range clients {
		clients[i] = &client{addr: l.Addr().String(), sent: [][]byte{make([]byte, size)}}
	}
	once(t, clients...)
	for _, c := range clients {
		if n := <-got; n != size || c.errors != 0 || len(c.took) != 1 {
			t.Errorf("%d bytes came; %d answers, %v", n, len(c.took), c.err)
		}
	}
}

// At a rate as many requests are asked as arrive, and the clock of each runs from then, though all clients are busy.
func TestArrivals(t *testing.T) {
	const rate, span = 4000, 25 * time.Millisecond
	x := &standin.Instant{}
	at, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- x.Serve(t.Context(), at) }()
	t.Cleanup(func() {
		_ = at.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	s := shape{kind: kindJSON, body: 1024, rate: rate}
	clients := []*client{{addr: at.Addr().String(), sent: requests(s, at.Addr().String())}}
	l, err := newLoop(clients, rate)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := errors.Join(l.run(t.Context(), began, began.Add(span)), l.close()); err != nil {
		t.Fatal(err)
	}
	want := 0
	gaps := rand.New(rand.NewPCG(1, rate))
	for at := time.Duration(0); at <= span; at += time.Duration(gaps.ExpFloat64() / rate * float64(time.Second)) {
		want++
	}
	if c := clients[0]; len(c.took) != want || c.errors != 0 || x.Hits() != int64(want) {
		t.Errorf("%d answers and %d errors of %d requests, %d hits", len(c.took), c.errors, want, x.Hits())
	}
}

// Whoever is interrupted does not wait for an answer.
func TestInterrupted(t *testing.T) {
	at, err := net.Listen("tcp", "127.0.0.1:0") // nobody answers
	if err != nil {
		t.Fatal(err)
	}
	defer at.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := shape{kind: kindJSON, body: 1024, conns: 2}
	if _, err := load(ctx, at.Addr().String(), s, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{Parts: []string{"half"}}, {Kinds: []string{"xml"}}, {Bodies: []int{3}}, {Conns: []int{0}}, {Rounds: -1}, {Run: time.Microsecond}, {Rate: -1}, {Pace: time.Microsecond}, {Pace: time.Second}, {Streams: -1}} {
		if o.Check() == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}
