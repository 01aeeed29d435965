package bench

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// TestMain also is the benchmark's daemons.
func TestMain(m *testing.M) {
	MaybeChild()
	os.Exit(m.Run())
}

// A small run of everything: real daemons in processes of their own, limits in C or Go, bytes verified.
func TestTransfer(t *testing.T) {
	for _, inGo := range []bool{false, true} {
		r, err := Transfer(t.Context(), Options{Blocks: []int{4 << 10, 64 << 10}, Bytes: 32 << 20, Region: 16 << 20, Rounds: 2, GoLimits: inGo})
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Rows) != 4 {
			t.Fatalf("%d rows", len(r.Rows))
		}
		for _, row := range r.Rows {
			if row.OursGBps <= 0 || row.LimitGBps <= 0 || row.Ratio < row.RatioMin || row.Ratio > row.RatioMax || row.VerifiedBytes != 16<<20 || len(row.Pairs) != 2 {
				t.Errorf("%+v", row)
			}
		}
		var table, doc bytes.Buffer
		if err := Print(&table, r, false); err != nil || !strings.Contains(table.String(), "64") || strings.Count(table.String(), "\n") != 6 {
			t.Errorf("table: %v\n%s", err, table.String())
		}
		if err := Print(&doc, r, true); err != nil {
			t.Fatal(err)
		}
		var back Report
		if err := json.Unmarshal(doc.Bytes(), &back); err != nil || len(back.Rows) != 4 || back.Kind != "headrace.bench.transfer" {
			t.Errorf("document: %v", err)
		}
	}
}

func TestTransferRefuses(t *testing.T) {
	for name, o := range map[string]Options{"transport": {Transport: "pigeon"}, "block": {Blocks: []int{100}}, "uneven": {Blocks: []int{3 << 20}}} {
		if _, err := Transfer(t.Context(), o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := Transfer(t.Context(), Options{Child: []string{"/bin/false"}, Region: 1 << 20}); err == nil || !strings.Contains(err.Error(), "start daemon") {
		t.Errorf("daemon that does not start: %v", err)
	}
}

func TestMedian(t *testing.T) {
	if m := median([]float64{3, 1, 2}); m != 2 {
		t.Error(m)
	}
	if m := median([]float64{4, 1, 2, 3}); m != 2.5 {
		t.Error(m)
	}
}
