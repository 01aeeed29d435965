// Package tracing exports spans by OTLP over gRPC and carries W3C trace contexts. Spans are told when they are over, all at once
// for a request: nothing is done for them while it is served, and nothing at all for one that is not sampled.
//
// It knows neither routers nor requests.
package tracing

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Config of a Tracer.
type Config struct {
	// Endpoint of a collector's gRPC receiver: http://HOST:4317, https://HOST:4317 or HOST:4317, which is without TLS. "": what
	// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT says; without these there is no Tracer.
	Endpoint string
	// Ratio is the share of requests that is traced where the client has not decided, 0 to 1. Below 0: what OTEL_TRACES_SAMPLER and
	// OTEL_TRACES_SAMPLER_ARG say, else all.
	Ratio    float64
	Service  string // OTEL_SERVICE_NAME is stronger
	Instance string
	Version  string
}

// Tracer exports spans. Its methods are safe for concurrent use.
type Tracer struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	parent   bool   // the client's decision counts
	below    uint64 // traces are sampled whose id's last half, less its lowest bit, is below it
}

// Check says what cannot be of a configuration and of the environment, before anything is opened.
func (c Config) Check() error {
	_, err := c.plan()
	return err
}

// plan makes a Tracer that exports nothing yet, nil where nobody wants one, and completes the configuration.
func (c *Config) plan() (*Tracer, error) {
	env := os.Getenv
	if c.Ratio > 1 {
		return nil, fmt.Errorf("share of traced requests %v: must be from 0 to 1", c.Ratio)
	}
	if strings.EqualFold(env("OTEL_SDK_DISABLED"), "true") || strings.EqualFold(env("OTEL_TRACES_EXPORTER"), "none") && c.Endpoint == "" {
		return nil, nil
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"} {
		if c.Endpoint == "" {
			c.Endpoint = env(name)
		}
	}
	if c.Endpoint == "" {
		return nil, nil
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		if p := env(name); p != "" && p != "grpc" {
			return nil, fmt.Errorf("%s=%s: spans go out by gRPC alone; take the collector's gRPC port (4317) and set it to grpc", name, p)
		}
	}
	if !strings.Contains(c.Endpoint, "://") {
		c.Endpoint = "http://" + c.Endpoint
	}
	if u, err := url.Parse(c.Endpoint); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("OTLP endpoint %q: use http://HOST:PORT, or https:// for TLS", c.Endpoint)
	}
	t := &Tracer{parent: true}
	if err := t.sample(c.Ratio, env("OTEL_TRACES_SAMPLER"), env("OTEL_TRACES_SAMPLER_ARG")); err != nil {
		return nil, err
	}
	return t, nil
}

// New makes a Tracer, or nil where nobody wants one. It does not wait for the collector. Close must be called.
func New(ctx context.Context, cfg Config) (*Tracer, error) {
	t, err := cfg.plan()
	if t == nil || err != nil {
		return nil, err
	}
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpointURL(cfg.Endpoint))
	if err != nil {
		return nil, fmt.Errorf("make OTLP exporter: %w", err)
	}
	res, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", cfg.Service), attribute.String("service.version", cfg.Version), attribute.String("service.instance.id", cfg.Instance)), resource.WithFromEnv())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("describe this process for OTLP: %w", err), exporter.Shutdown(ctx))
	}
	t.provider = sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res), sdktrace.WithSampler(sdktrace.AlwaysSample()), sdktrace.WithIDGenerator(given{}))
	t.tracer = t.provider.Tracer("github.com/headrace/headrace")
	return t, nil
}

// sample sets what is traced.
func (t *Tracer) sample(ratio float64, sampler, arg string) error {
	if ratio < 0 {
		ratio = 1
		kind, parent := strings.CutPrefix(sampler, "parentbased_")
		t.parent = parent || sampler == ""
		switch kind {
		case "", "always_on":
		case "always_off":
			ratio = 0
		case "traceidratio":
			if arg != "" {
				var err error
				if ratio, err = strconv.ParseFloat(arg, 64); err != nil {
					return fmt.Errorf("OTEL_TRACES_SAMPLER_ARG=%s: must be a number from 0 to 1", arg)
				}
			}
		default:
			return fmt.Errorf("OTEL_TRACES_SAMPLER=%s: must be always_on, always_off or traceidratio, with parentbased_ in front or without", sampler)
		}
	}
	if !(ratio >= 0 && ratio <= 1) {
		return fmt.Errorf("share of traced requests %v: must be from 0 to 1", ratio)
	}
	t.below = uint64(ratio * (1 << 63))
	return nil
}

// Close exports what is left while ctx lasts.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return t.provider.Shutdown(ctx)
}

// Context is a request's place in a trace.
type Context struct {
	Trace   [16]byte
	Parent  [8]byte // the client's span, zero where it has none
	Span    [8]byte // the request's own
	Sampled bool
	State   string // the client's tracestate
}

// Join takes the client's traceparent and tracestate. A traceparent that cannot be read counts as none.
func (t *Tracer) Join(parent, state []byte) Context {
	var c Context
	if trace, span, sampled, ok := parseParent(parent); ok {
		c = Context{Trace: trace, Parent: span, State: string(state), Sampled: sampled}
		if !t.parent {
			c.Sampled = t.ratio(&c.Trace)
		}
	} else {
		_, _ = rand.Read(c.Trace[:]) // never fails
		c.Sampled = t.ratio(&c.Trace)
	}
	if c.Sampled {
		c.Span = NewSpan()
	} else {
		c.Span = c.Parent
	}
	if c.Span == ([8]byte{}) { // a traceparent needs one, traced or not
		c.Span = NewSpan()
	}
	return c
}

func (t *Tracer) ratio(id *[16]byte) bool { return binary.BigEndian.Uint64(id[8:])>>1 < t.below }

// NewSpan draws a span's id.
func NewSpan() (id [8]byte) {
	_, _ = rand.Read(id[:])
	return id
}

// Headers are what a span of c sends on.
func (c *Context) Headers(span [8]byte) [][2]string {
	b := make([]byte, 0, 55)
	b = hex.AppendEncode(append(b, "00-"...), c.Trace[:])
	b = hex.AppendEncode(append(b, '-'), span[:])
	if c.Sampled {
		b = append(b, "-01"...)
	} else {
		b = append(b, "-00"...)
	}
	h := [][2]string{{"traceparent", string(b)}}
	if c.State != "" {
		h = append(h, [2]string{"tracestate", c.State})
	}
	return h
}

// Valid tells whether parent is a traceparent that may be passed on.
func Valid(parent []byte) bool {
	_, _, _, ok := parseParent(parent)
	return ok
}

// parseParent reads a traceparent: https://www.w3.org/TR/trace-context/, version 00, and the same members of later ones.
func parseParent(b []byte) (id [16]byte, span [8]byte, sampled, ok bool) {
	if len(b) < 55 || b[2] != '-' || b[35] != '-' || b[52] != '-' || len(b) > 55 && (b[55] != '-' || string(b[:2]) == "00") || len(b) > 512 {
		return
	}
	for i, c := range b[:55] {
		if i != 2 && i != 35 && i != 52 && (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return
		}
	}
	for _, c := range b[55:] {
		if c <= ' ' || c >= 0x7f {
			return
		}
	}
	var flags [1]byte
	_, _ = hex.Decode(id[:], b[3:35])
	_, _ = hex.Decode(span[:], b[36:52])
	_, _ = hex.Decode(flags[:], b[53:55])
	ok = string(b[:2]) != "ff" && id != [16]byte{} && span != [8]byte{}
	return id, span, flags[0]&1 == 1, ok
}

// Span is one that is over.
type Span struct {
	ID, Parent [8]byte // Parent is zero for the trace's first
	Name       string
	Server     bool // it answered a client, who may be traced too
	Start, End time.Time
	Attributes []attribute.KeyValue
	Events     []Event
	Error      string // "" for what went well
}

// Event is a moment within a span.
type Event struct {
	Name string
	At   time.Time
}

// Emit exports a span of c's trace, in a while.
func (t *Tracer) Emit(c *Context, s *Span) {
	state, _ := trace.ParseTraceState(c.State) // one that cannot be read is passed on and not exported
	ctx := context.WithValue(context.Background(), idsKey{}, ids{c.Trace, s.ID})
	if s.Parent != ([8]byte{}) {
		ctx = trace.ContextWithSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{TraceID: c.Trace, SpanID: s.Parent, TraceFlags: trace.FlagsSampled, TraceState: state, Remote: s.Server}))
	}
	kind := trace.SpanKindInternal
	if s.Server {
		kind = trace.SpanKindServer
	}
	_, span := t.tracer.Start(ctx, s.Name, trace.WithTimestamp(s.Start), trace.WithSpanKind(kind), trace.WithAttributes(s.Attributes...))
	for _, e := range s.Events {
		span.AddEvent(e.Name, trace.WithTimestamp(e.At))
	}
	if s.Error != "" {
		span.SetStatus(codes.Error, s.Error)
	}
	span.End(trace.WithTimestamp(s.End))
}

// ids are those of a span, which engines were told before it began for the SDK.
type ids struct {
	trace [16]byte
	span  [8]byte
}

type idsKey struct{}

// given is the SDK's generator of ids: it takes them from the context.
type given struct{}

var _ sdktrace.IDGenerator = given{}

// NewIDs is for a trace's first span.
func (given) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	i, _ := ctx.Value(idsKey{}).(ids)
	return i.trace, i.span
}

// NewSpanID is for any other.
func (given) NewSpanID(ctx context.Context, _ trace.TraceID) trace.SpanID {
	i, _ := ctx.Value(idsKey{}).(ids)
	return i.span
}
