package bench

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
)

//go:embed limits/limits.c
var limitsSource []byte

// limitVectors is how many blocks a call of the TCP loop carries: more than 8 gained nothing, fewer lost half.
const limitVectors = 16

// limits runs the loops that are the ceiling: in C where a compiler is found, else in Go.
type limits struct {
	program string // "" for the Go loops
	what    string
}

func newLimits(ctx context.Context, dir string, inGo bool) *limits {
	if inGo {
		return &limits{what: "loops in Go, as asked for"}
	}
	for _, cc := range []string{os.Getenv("CC"), "cc", "gcc", "clang"} {
		if cc == "" {
			continue
		}
		path, err := exec.LookPath(cc)
		if err != nil {
			continue
		}
		source, program := filepath.Join(dir, "limits.c"), filepath.Join(dir, "limits")
		if err := os.WriteFile(source, limitsSource, 0o600); err != nil {
			continue
		}
		if err := exec.CommandContext(ctx, path, "-O2", "-pthread", "-o", program, source).Run(); err == nil {
			return &limits{program: program, what: "C loops of bench/limits/limits.c, built with " + path + " -O2"}
		}
	}
	return &limits{what: "loops in Go: no C compiler was found"}
}

// name describes a kind of limit for people.
func (l *limits) name(kind string) string {
	lang := "C"
	if l.program == "" {
		lang = "Go"
	}
	if kind == "tcp" {
		return fmt.Sprintf("%s writev/readv loop of %d scattered blocks a call", lang, limitVectors)
	}
	return lang + " scattered copy, one thread"
}

// run measures one kind, tcp or copy.
func (l *limits) run(ctx context.Context, kind string, block int, bytes, region int64) (Measure, error) {
	width := 1
	if kind == "tcp" {
		width = limitVectors
	}
	if l.program == "" {
		return goLimit(kind, block, bytes, region, width)
	}
	cmd := exec.CommandContext(ctx, l.program, kind, strconv.Itoa(block), strconv.FormatInt(bytes, 10), strconv.FormatInt(region, 10), strconv.Itoa(width))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return Measure{}, fmt.Errorf("run %s limit: %w", kind, err)
	}
	var m Measure
	if err := json.Unmarshal(out, &m); err != nil || m.Seconds <= 0 {
		return m, fmt.Errorf("read %s limit's answer %q: %w", kind, out, err)
	}
	return m, nil
}
