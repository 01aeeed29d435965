package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// The benchmark measures what it says; its figures are no matter of a test, but that of the heap is.
func TestIndex(t *testing.T) {
	r, err := Index(t.Context(), IndexOptions{Duration: 30 * time.Millisecond, Churn: time.Second, Bytes: 2 << 20, Workers: 2, prompt: 1600, held: 1 << 10})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, row := range r.Rows {
		names = append(names, row.Name)
		if row.Value <= 0 || row.Name == "heap" && !row.Met {
			t.Errorf("%+v", row)
		}
	}
	if got := strings.Join(names, " "); got != "events frames lookup-2-p50 lookup-2-p99 lookup-64-p50 lookup-64-p99 lookup-256-p50 lookup-256-p99 heap" || !r.Complete {
		t.Errorf("rows %s", got)
	}
	for _, asJSON := range []bool{false, true} {
		var out bytes.Buffer
		if err := PrintIndex(&out, r, asJSON); err != nil || !strings.Contains(out.String(), "lookup-64-p99") || asJSON && !json.Valid(out.Bytes()) {
			t.Errorf("%v: %s", err, out.String())
		}
	}
}

func TestIndexIsCutShort(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r, err := Index(ctx, IndexOptions{Workers: 1, Bytes: 1 << 20, held: 1 << 10})
	if err != nil || r.Complete {
		t.Errorf("%+v, %v", r, err)
	}
	for _, o := range []IndexOptions{{Bytes: 1}, {Workers: -1}, {Duration: -1}, {Churn: -1}} {
		if o.Check() == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}
