package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestProfileSaysWhatIsWrong(t *testing.T) {
	dir := t.TempDir()
	for want, args := range map[string][]string{
		"what is to be measured?":          {},
		"give one of --standin":            {"--standin", "--url", "http://127.0.0.1:1"},
		"--table is for --standin":         {"--model", "x.gguf", "--table", "t.yaml"},
		"use http://HOST:PORT":             {"--url", "127.0.0.1:1"},
		"give one degree":                  {"--url", "http://127.0.0.1:1", "--tp", "1,2"},
		"--ttft and --itl must be above 0": {"--standin", "--ttft", "0s"},
		"in the wrong order":               {"--standin", "--ttft", "1ms", "--itl", "2s"},
		"--rounds 0":                       {"--standin", "--rounds", "0"},
		"--cached must have 0":             {"--standin", "--cached", "0.5"},
		"use vllm, or --command":           {"--engine", "sglang", "--model", "x"},
		"is no placeholder":                {"--command", "run {what} --tp {tp}"},
		"--env \"A\"":                      {"--command", "run {tp}", "--env", "A"},
		"there is no reference":            {"--reference", "nothing"},
		"--model: stat":                    {"--model", filepath.Join(dir, "none.gguf")},
		"--table: read timing table":       {"--standin", "--table", filepath.Join(dir, "tp{tp}.yaml")},
		"are of no use":                    {"--url", "http://127.0.0.1:1", "--", "--more"},
		"--channel-rate must be above 0":   {"--standin", "--channel-rate", "0"},
	} {
		var out, errs bytes.Buffer
		code := run(t.Context(), append([]string{"profile", "--out", filepath.Join(dir, "p")}, args...), &out, &errs)
		if code != exitMisused || !strings.Contains(errs.String(), want) || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%q: exit %d, %q, want %q", args, code, errs.String(), want)
		}
	}
	var out, errs bytes.Buffer
	code := run(t.Context(), []string{"profile", "--out", filepath.Join(dir, "u"), "--url", "http://127.0.0.1:1"}, &out, &errs)
	if code != exitFailed || !strings.Contains(errs.String(), "no engine answers at http://127.0.0.1:1") {
		t.Errorf("unreachable: exit %d, %q", code, errs.String())
	}
}

// A reference becomes a table that the simulator takes.
func TestProfileOfAReference(t *testing.T) {
	dir := t.TempDir()
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"profile", "--reference", "opt-13b-a100", "--ttft", "400ms", "--itl", "60ms", "--out", dir}, &out, &errs); code != exitDone || !strings.Contains(out.String(), "https://") {
		t.Fatalf("exit %d: %s%s", code, out.String(), errs.String())
	}
	for name, want := range map[string]string{"report.svg": "</svg>", "report.html": "<svg", "profile.json": `"choice"`, "table.json": `"surfaces"`} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Contains(b, []byte(want)) {
			t.Errorf("%s: %v, no %q", name, err, want)
		}
	}
	trace := filepath.Join(dir, "t.csv")
	if err := os.WriteFile(trace, []byte("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:10:00.5,500,20\n2023-11-16 18:10:09.5,700,30\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if code := run(t.Context(), []string{"plan", "replay", "--trace", trace, "--table", filepath.Join(dir, "table.json"), "--planner", "sla,predictive"}, &out, &errs); code != exitDone || !strings.Contains(out.String(), "predictive") {
		t.Errorf("replay: exit %d: %s%s", code, out.String(), errs.String())
	}
}
