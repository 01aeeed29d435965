package enginebench

import (
	"bytes"
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/worker/tinymodel"
)

func tiny(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tiny.gguf")
	if err := tinymodel.Write(path, tinymodel.Options{Seed: 1, DType: gguf.Q4_0}); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReport(t *testing.T) {
	r, err := Run(t.Context(), Options{Model: tiny(t), Prompt: 40, Generate: 4, Contexts: []int{3, 20}, Batches: []int{1, 2}, Rounds: 2})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 5 || r.Type != "Q4_0" || r.LoadMs <= 0 || r.WeightsMB <= 0 {
		t.Errorf("report is %+v", r)
	}
	for _, row := range r.Rows {
		if len(row.Rounds) != 2 || row.Rate <= 0 {
			t.Errorf("row is %+v", row)
		}
	}
	var doc, table bytes.Buffer
	if err := Print(&doc, r, true); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(doc.Bytes(), &back); err != nil || len(back.Rows) != 5 {
		t.Errorf("document %s: %v", doc.String(), err)
	}
	if err := Print(&table, r, false); err != nil || strings.Count(table.String(), "decode") != 4 {
		t.Errorf("table %s: %v", table.String(), err)
	}
}

func TestRefusals(t *testing.T) {
	model := tiny(t)
	for want, o := range map[string]Options{
		"no such file": {Model: model + ".absent"},
		"negative":     {Model: model, Prompt: -1},
		"at least 1":   {Model: model, Batches: []int{0}},
		"context of":   {Model: model, Prompt: 5000},
		"it ended":     {Model: model, Worker: "false"},
	} {
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error about %q", err, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, Options{Model: model}); err == nil {
		t.Error("ran although cancelled")
	}
}

func TestMedian(t *testing.T) {
	if median([]float64{3, 1, 2}) != 2 || median([]float64{4, 1}) != 2.5 {
		t.Error("median is wrong")
	}
}
