package tracing

import (
	"context"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/headrace/headrace/internal/tracing/tracingtest"
)

const parentOn = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// clean takes away what the environment says of tracing.
func clean(t *testing.T) {
	for _, name := range []string{"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"} {
		t.Setenv(name, "")
	}
}

func TestNothingIsTracedUnlessAskedFor(t *testing.T) {
	clean(t)
	if x, err := New(context.Background(), Config{Ratio: -1}); x != nil || err != nil {
		t.Errorf("%v, %v", x, err)
	}
	for name, bad := range map[string]Config{"endpoint": {Endpoint: "ftp://h:1", Ratio: -1}, "ratio": {Endpoint: "h:1", Ratio: 1.5}} {
		if x, err := New(context.Background(), bad); err == nil {
			t.Errorf("%s: %v", name, x)
		}
	}
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	if _, err := New(context.Background(), Config{Endpoint: "h:1", Ratio: -1}); err == nil || !strings.Contains(err.Error(), "4317") {
		t.Errorf("another protocol: %v", err)
	}
}

func TestSampling(t *testing.T) {
	for _, c := range []struct {
		ratio          float64
		sampler, arg   string
		alone, on, off float64 // the share that is traced: with no client's word, with its yes, with its no
		wrong          bool
	}{
		{ratio: -1, alone: 1, on: 1},
		{ratio: 0, on: 1},
		{ratio: 0.25, alone: 0.25, on: 1},
		{ratio: -1, sampler: "parentbased_always_off", on: 1},
		{ratio: -1, sampler: "always_off"},
		{ratio: -1, sampler: "always_on", alone: 1, on: 1, off: 1},
		{ratio: -1, sampler: "parentbased_traceidratio", arg: "0.5", alone: 0.5, on: 1},
		{ratio: -1, sampler: "jaeger_remote", wrong: true},
		{ratio: -1, sampler: "traceidratio", arg: "much", wrong: true},
	} {
		x := &Tracer{parent: true}
		if err := x.sample(c.ratio, c.sampler, c.arg); (err != nil) != c.wrong {
			t.Errorf("%+v: %v", c, err)
		} else if err != nil {
			continue
		}
		const n = 4000
		share := func(parent string) float64 {
			k := 0
			for range n {
				if x.Join([]byte(parent), nil).Sampled {
					k++
				}
			}
			return float64(k) / n
		}
		for what, got := range map[string][2]float64{"alone": {share(""), c.alone}, "on": {share(parentOn), c.on}, "off": {share(parentOn[:54] + "0"), c.off}} {
			if d := got[0] - got[1]; d > 0.05 || d < -0.05 { // more than six standard deviations
				t.Errorf("%+v: %s: %v of the requests", c, what, got[0])
			}
		}
	}
}

func TestJoinAndPassOn(t *testing.T) {
	x := &Tracer{parent: true}
	if err := x.sample(1, "", ""); err != nil {
		t.Fatal(err)
	}
	c := x.Join([]byte(parentOn), []byte("a=1"))
	h := c.Headers([8]byte{1, 2, 3, 4, 5, 6, 7, 8})
	if len(h) != 2 || h[0][1] != "00-0af7651916cd43dd8448eb211c80319c-0102030405060708-01" || h[1] != [2]string{"tracestate", "a=1"} {
		t.Errorf("%v", h)
	}
	if c := x.Join([]byte("nonsense"), []byte("a=1")); c.State != "" || c.Parent != [8]byte{} || !c.Sampled {
		t.Errorf("%+v", c)
	}
	off := x.Join([]byte(parentOn[:54]+"0"), nil)
	if h := off.Headers(off.Span); h[0][1] != parentOn[:54]+"0" {
		t.Errorf("a trace that is not sampled goes on as %v", h)
	}
}

func FuzzParseParent(f *testing.F) {
	for _, s := range []string{parentOn, "", "ff" + parentOn[2:], parentOn + "-x", "01" + parentOn[2:] + "-x", "00-00000000000000000000000000000000-b7ad6b7169203331-01", strings.ToUpper(parentOn), parentOn[:54] + "\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		id, span, sampled, ok := parseParent(b)
		if !ok {
			return
		}
		for _, c := range b {
			if c <= ' ' || c >= 0x7f {
				t.Fatalf("%q would be passed on", b)
			}
		}
		c := Context{Trace: id, Sampled: sampled}
		if h := c.Headers(span)[0][1]; h[3:52] != string(b[3:52]) || (h[54] == '1') != sampled {
			t.Errorf("%q became %q", b, h)
		}
	})
}

func TestExport(t *testing.T) {
	clean(t)
	at := tracingtest.Start(t)
	x, err := New(context.Background(), Config{Endpoint: at.Endpoint, Ratio: 1, Service: "s", Instance: "i", Version: "v"})
	if err != nil {
		t.Fatal(err)
	}
	c := x.Join([]byte(parentOn), []byte("a=1"))
	begin := time.Unix(1_700_000_000, 5000)
	x.Emit(&c, &Span{ID: c.Span, Parent: c.Parent, Name: "root", Server: true, Start: begin, End: begin.Add(time.Second), Error: "bad", Attributes: []attribute.KeyValue{attribute.String("k", "v")}, Events: []Event{{"e", begin}}})
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := x.Close(ctx); err != nil {
		t.Fatal(err)
	}
	got, of := at.Spans()
	if len(got) != 1 || of["service.name"] != "s" || of["service.instance.id"] != "i" {
		t.Fatalf("%v of %v", got, of)
	}
	s := got[0]
	if tracingtest.ID(s.TraceId) != "0af7651916cd43dd8448eb211c80319c" || tracingtest.ID(s.ParentSpanId) != "b7ad6b7169203331" || string(s.SpanId) != string(c.Span[:]) || s.TraceState != "a=1" ||
		s.Name != "root" || tracingtest.Took(s) != time.Second || s.Status.Message != "bad" || tracingtest.Attributes(s.Attributes)["k"] != "v" || len(s.Events) != 1 {
		t.Errorf("%v", s)
	}
}
