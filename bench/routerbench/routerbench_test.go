package routerbench

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
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
	r, err := Run(t.Context(), Options{Bodies: []int{1024, 20_000}, Conns: []int{2}, Rounds: 1, Run: 20 * time.Millisecond, Rate: 100})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 2*2*3 || !r.Complete {
		t.Errorf("%d rows", len(r.Rows))
	}
	for _, row := range r.Rows {
		for _, x := range row.All {
			if x.Errors != 0 || !(x.RPS > 0) || !(x.P50 > 0) || !(x.P99 >= x.P50) {
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
			server, conn := net.Pipe()
			go func() {
				var b [1024]byte
				_, _ = server.Read(b[:])
				_, _ = io.WriteString(server, row.answer)
				_ = server.Close()
			}()
			c := &client{conn: conn, sent: [][]byte{[]byte("x")}, stream: row.stream}
			defer c.close()
			if _, err := c.exchange(); (err == nil) != row.good {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{Parts: []string{"half"}}, {Kinds: []string{"xml"}}, {Bodies: []int{3}}, {Conns: []int{0}}, {Rounds: -1}, {Run: time.Microsecond}, {Rate: -1}} {
		if o.Check() == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}
