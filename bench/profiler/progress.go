package profiler

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/headrace/headrace/scheduler/profile"
)

// OpenLog opens what engines say in a profile's folder, which it makes.
func OpenLog(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make folder for the profile: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, enginesFile), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open what engines say: %w", err)
	}
	return f, nil
}

// NewProgress shows a bar for each engine on a terminal, and a line for each point elsewhere.
func NewProgress(w io.Writer, terminal bool) Progress {
	if terminal {
		return &bar{w: w}
	}
	return &lines{w: w}
}

type lines struct{ w io.Writer }

func (l *lines) Engine(degree int) {
	fmt.Fprintf(l.w, "degree %d: the engine starts\n", degree)
}

func (l *lines) Plan(degree, done, all int) {
	if done > 0 {
		fmt.Fprintf(l.w, "degree %d: %d of %d points are known from before\n", degree, done, all)
	}
}

func (l *lines) Point(p *profile.Point, done, all int) {
	if p.Why != "" {
		fmt.Fprintf(l.w, "degree %d: %d/%d %s: %s\n", p.Degree, done, all, p, p.Why)
		return
	}
	fmt.Fprintf(l.w, "degree %d: %d/%d %s: %.4g ms\n", p.Degree, done, all, p, p.Ms)
}

func (l *lines) Warn(text string) { fmt.Fprintln(l.w, text) }

// bar is redrawn in its place; what is worth keeping stands above it.
type bar struct {
	w   io.Writer
	now *progressbar.ProgressBar
}

func (b *bar) Engine(degree int) {
	fmt.Fprintf(b.w, "degree %d: the engine starts\n", degree)
}

func (b *bar) Plan(degree, done, all int) {
	b.now = progressbar.NewOptions(all, progressbar.OptionSetWriter(b.w), progressbar.OptionSetDescription(fmt.Sprintf("degree %d", degree)),
		progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true), progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionOnCompletion(func() { fmt.Fprintln(b.w) }))
	_ = b.now.Set(done) // drawing is all that can go wrong
}

func (b *bar) Point(p *profile.Point, _, _ int) {
	if p.Why != "" {
		b.Warn(fmt.Sprintf("%s: %s", p, p.Why))
	}
	b.now.Describe(fmt.Sprintf("degree %d: %s", p.Degree, p))
	_ = b.now.Add(1)
}

func (b *bar) Warn(text string) {
	if b.now != nil {
		_ = b.now.Clear()
	}
	fmt.Fprintln(b.w, text)
}
