package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPlanReplay(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "t.csv")
	var text strings.Builder
	text.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens\n")
	for i := range 300 {
		fmt.Fprintf(&text, "2023-11-16 18:%02d:%02d.5,%d,%d\n", 10+i/60, i%60, 100+i*7%2000, 10+i%90)
	}
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	replay := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := run(context.Background(), append([]string{"plan", "replay", "--trace", file}, args...), &out, &errs)
		return code, out.String(), errs.String()
	}
	svg := filepath.Join(dir, "p.svg")
	code, first, errs := replay("--planner", "static:prefill=1:decode=1,static:prefill=2:decode=2", "--log", "-", "--plot", svg)
	if code != exitDone || !strings.Contains(first, "prefill=2:decode=2") || !strings.Contains(first, `"had":{"prefill":4,"decode":4}`) {
		t.Fatalf("exit %d: %s\n%s", code, first, errs)
	}
	drawn, err := os.ReadFile(svg)
	if err != nil || !bytes.Contains(drawn, []byte("</svg>")) {
		t.Errorf("no plot: %v", err)
	}
	events := func(dir string) []byte {
		if code, _, errs := replay("--planner", "static:prefill=1:decode=1", "--history", dir); code != exitDone {
			t.Fatalf("exit %d: %s", code, errs)
		}
		data, err := os.ReadFile(filepath.Join(dir, "static,prefill=1,decode=1", "events.out.tfevents.0.replay"))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	one, two := events(filepath.Join(dir, "one")), events(filepath.Join(dir, "two"))
	if !bytes.Equal(one, two) || !bytes.Contains(one, []byte("decode/kv_usage")) || !bytes.Contains(one, []byte("4P+4D to 1P+1D: always 1P+1D")) {
		t.Errorf("histories of %d and %d bytes", len(one), len(two))
	}
	if _, again, _ := replay("--planner", "static:prefill=1:decode=1,static:prefill=2:decode=2", "--log", "-"); again != first {
		t.Errorf("two runs differ:\n%s\n%s", first, again)
	}
	for _, c := range [][]string{{"--planner", "best"}, {"--planner", "static:size=3"}, {"--table", "none"}, {"--max-gpus", "1"}, {"--from", "9s", "--to", "3s"}, {"--speedup", "0"}, {"--ttft", "0"}} {
		if code, _, errs := replay(c...); code != exitMisused || errs == "" {
			t.Errorf("%v: exit %d, %s", c, code, errs)
		}
	}
}
