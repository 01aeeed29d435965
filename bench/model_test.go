package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"strings"
	"testing"
)

// The bytes a token takes, by hand from the published configurations.
func TestGeometries(t *testing.T) {
	for name, want := range map[string]int64{
		"llama-3-8b": 128 * kib, "llama-3-70b": 320 * kib, "qwen2.5-7b": 56 * kib, "qwen3-32b": 256 * kib,
		"deepseek-v2-lite": 27 * 1152, "deepseek-v3": 61 * 1152,
	} {
		g, err := geometry(name)
		if err != nil || g.TokenBytes() != want {
			t.Errorf("%s: %d bytes a token, want %d, %v", name, g.TokenBytes(), want, err)
		}
		l := g.layout(10)
		if err := l.Validate(uint64(want * 160)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := l.Validate(uint64(want*160) - 1); err == nil {
			t.Errorf("%s: its layout leaves room", name)
		}
	}
}

func TestModel(t *testing.T) {
	o := ModelOptions{Models: []string{"qwen2.5-7b", "deepseek-v2-lite"}, Tokens: []int{100, 1 << 20}, Rounds: 1, Memory: 64 * mib, Rates: map[string]float64{"": 5000, "qwen2.5-7b": 10000}}
	r, err := Model(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !r.Complete || len(r.Rows) != 4 || len(r.NotMeasured) != 2 {
		t.Fatalf("complete %v, %d rows, %v", r.Complete, len(r.Rows), r.NotMeasured)
	}
	for _, row := range r.Rows {
		g, err := geometry(row.Model)
		if err != nil {
			t.Fatal(err)
		}
		if row.Bytes != 112*g.TokenBytes() || row.Verified != row.Bytes || row.GBps <= 0 || row.Tail <= 0 || row.Tail >= row.TTFTOverlap {
			t.Errorf("%+v", row)
		}
		if want := map[string]float64{"qwen2.5-7b": 0.01, "deepseek-v2-lite": 0.02}[row.Model]; math.Abs(row.Prefill-want) > 1e-9 {
			t.Errorf("%s: prefill %g s, want %g", row.Model, row.Prefill, want)
		}
	}
	var text, doc bytes.Buffer
	if err := PrintModel(&text, r, false); err != nil || !strings.Contains(text.String(), "deepseek-v2-lite") || strings.Contains(text.String(), "NaN") {
		t.Errorf("%v\n%s", err, text.String())
	}
	if err := PrintModel(&doc, r, true); err != nil || !json.Valid(doc.Bytes()) {
		t.Errorf("document: %v", err)
	}
	if n := children(t); n != 0 {
		t.Errorf("%d children are left", n)
	}
}

func TestModelInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	o := ModelOptions{Models: []string{"deepseek-v2-lite"}, Tokens: []int{32, 64}, Rounds: 1, Memory: 64 * mib, Progress: writerFunc(func([]byte) { cancel() })}
	r, err := Model(ctx, o)
	if err != nil || r.Complete || len(r.Rows) != 1 {
		t.Errorf("%v, complete %v, %d rows", err, r.Complete, len(r.Rows))
	}
}

func TestModelRefuses(t *testing.T) {
	for name, o := range map[string]ModelOptions{
		"transport": {Transport: "pigeon"}, "model": {Models: []string{"x"}}, "tokens": {Tokens: []int{0}},
		"rate": {Rates: map[string]float64{"": 0}}, "rate's model": {Rates: map[string]float64{"x": 1}}, "rounds": {Rounds: -1},
	} {
		if _, err := Model(t.Context(), o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
