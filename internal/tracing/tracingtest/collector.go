// Package tracingtest has an OTLP receiver for tests. It is a real one, over gRPC, that keeps what it gets.
package tracingtest

import (
	"context"
	"encoding/hex"
	"net"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	spans "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// Collector keeps spans.
type Collector struct {
	collector.UnimplementedTraceServiceServer
	// Endpoint is its address, as an exporter is told it.
	Endpoint string

	mu       sync.Mutex // guards what follows
	spans    []*spans.Span
	resource map[string]string
}

// Start starts a collector that ends with the test.
func Start(t testing.TB) *Collector {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &Collector{Endpoint: "http://" + ln.Addr().String()}
	srv := grpc.NewServer()
	collector.RegisterTraceServiceServer(srv, c)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(ln)
	}()
	t.Cleanup(func() {
		srv.Stop()
		<-done
	})
	return c
}

// Export is the service's method.
func (c *Collector) Export(_ context.Context, r *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range r.ResourceSpans {
		c.resource = Attributes(rs.Resource.Attributes)
		for _, ss := range rs.ScopeSpans {
			c.spans = append(c.spans, ss.Spans...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// Spans returns all that came, and the resource that the last of them are of.
func (c *Collector) Spans() ([]*spans.Span, map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spans, c.resource
}

// Attributes returns the words and numbers of a list, numbers as words.
func Attributes(list []*common.KeyValue) map[string]string {
	out := map[string]string{}
	for _, kv := range list {
		if s, ok := kv.Value.Value.(*common.AnyValue_StringValue); ok {
			out[kv.Key] = s.StringValue
		} else {
			out[kv.Key] = kv.Value.String()
		}
	}
	return out
}

// ID is a trace's or a span's in hex.
func ID(b []byte) string { return hex.EncodeToString(b) }

// Took is how long a span lasted.
func Took(s *spans.Span) time.Duration {
	return time.Duration(s.EndTimeUnixNano - s.StartTimeUnixNano)
}
