package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"
)

// TestMain also is the benchmark's daemons.
func TestMain(m *testing.M) {
	MaybeChild()
	os.Exit(m.Run())
}

func smallOptions() Options {
	return Options{Quick: true, Blocks: []int{4 * kib, 64 * kib}, Bytes: 16 * mib, Region: 16 * mib, Rounds: 2}
}

// A small run of everything: real daemons in processes of their own, limits in C or Go, bytes verified.
func TestTransfer(t *testing.T) {
	for _, inGo := range []bool{false, true} {
		o := smallOptions()
		o.GoLimits = inGo
		if inGo {
			o.Parts = []string{partSizes}
		}
		r, err := Transfer(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if !r.Complete || len(r.rows(partSizes, "tcp")) != 2 || len(r.rows(partSizes, "shm")) != 2 {
			t.Fatalf("complete %v, %d rows", r.Complete, len(r.Rows))
		}
		for _, row := range r.Rows {
			checkRow(t, row)
		}
		var table, doc bytes.Buffer
		if err := Print(&table, r, false); err != nil || !strings.Contains(table.String(), "64 KiB") || strings.Contains(table.String(), "NaN") {
			t.Errorf("table: %v\n%s", err, table.String())
		}
		if err := Print(&doc, r, true); err != nil {
			t.Fatal(err)
		}
		var back Report
		if err := json.Unmarshal(doc.Bytes(), &back); err != nil || len(back.Rows) != len(r.Rows) || back.Kind != "headrace.bench.transfer" || back.Version != ReportVersion {
			t.Errorf("document: %v", err)
		}
	}
}

func checkRow(t *testing.T, row Row) {
	t.Helper()
	if row.Ours.GBps <= 0 || row.Verified != 16*mib || len(row.Ours.Runs) != 2 || row.Ours.CPUPerGB <= 0 {
		t.Errorf("%+v", row)
	}
	if row.Part == partSizes && row.other(loopTCP) == nil && row.other(loopCopy1) == nil {
		t.Errorf("%s %s has no loop beside it", row.Part, row.Transport)
	}
	for _, o := range row.Others {
		if o.GBps <= 0 || o.Ratio < o.RatioMin || o.Ratio > o.RatioMax || len(o.Runs) != 2 {
			t.Errorf("%s beside %+v", row.Part, o)
		}
	}
	if f := row.Fairness; row.Part == partEngines && (len(f.GBps) != row.Engines || f.Jain <= 0 || f.Jain > 1.0001 || f.MinOverMax > 1) {
		t.Errorf("%+v", f)
	}
}

func TestTransferRefuses(t *testing.T) {
	for name, o := range map[string]Options{"transport": {Transport: "pigeon"}, "block": {Blocks: []int{100}}, "uneven": {Blocks: []int{3 * mib}}, "part": {Parts: []string{"x"}}, "rounds": {Rounds: -1}} {
		if _, err := Transfer(t.Context(), o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	o := smallOptions()
	o.Child = []string{"/bin/false"}
	if _, err := Transfer(t.Context(), o); err == nil || !strings.Contains(err.Error(), "start daemon") {
		t.Errorf("daemon that does not start: %v", err)
	}
}

// What was measured before an interruption is kept, and nothing is left running.
func TestTransferInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	o := smallOptions()
	o.Parts = []string{partSizes}
	o.Progress = writerFunc(func(b []byte) {
		if bytes.Contains(b, []byte("sizes shm 4 KiB, round 1 of")) {
			cancel()
		}
	})
	r, err := Transfer(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	row := r.row(partSizes, "shm", 4*kib, 0, 0, 1)
	if r.Complete || len(r.rows(partSizes, "tcp")) != 2 || row == nil || len(row.Ours.Runs) != 1 {
		t.Errorf("complete %v, %d rows, last %+v", r.Complete, len(r.Rows), row)
	}
	if n := children(t); n != 0 {
		t.Errorf("%d children are left", n)
	}
}

func (r *Report) row(part, transport string, block, batch, lanes, engines int) *Row {
	for i := range r.Rows {
		if w := &r.Rows[i]; w.Part == part && w.Transport == transport && w.BlockBytes == block && w.BatchBlocks == batch && w.Lanes == lanes && w.Engines == engines {
			return w
		}
	}
	return nil
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) { f(b); return len(b), nil }

// children counts this process's living children.
func children(t *testing.T) int {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, task := range tasks {
		list, err := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		if err != nil {
			continue
		}
		n += len(strings.Fields(string(list)))
	}
	return n
}

func TestStatistics(t *testing.T) {
	if m := median([]float64{3, 1, 2}); m != 2 {
		t.Error(m)
	}
	if m := median([]float64{4, 1, 2, 3}); m != 2.5 {
		t.Error(m)
	}
	v := make([]float64, 1000)
	for i := range v {
		v[i] = float64(1000 - i)
	}
	for q, want := range map[float64]float64{0.5: 500, 0.9: 900, 0.99: 990, 0.999: 999, 1: 1000, 0: 1} {
		if got := quantile(v, q); got != want {
			t.Errorf("quantile %g is %g, want %g", q, got, want)
		}
	}
	if j, m := jain([]float64{2, 2, 2, 2}); j != 1 || m != 1 {
		t.Error(j, m)
	}
	if j, m := jain([]float64{1, 0, 0, 0}); j != 0.25 || m != 0 {
		t.Error(j, m)
	}
	if j, m := jain([]float64{0, 0}); j != 0 || m != 0 || math.IsNaN(j) {
		t.Error(j, m)
	}
}
