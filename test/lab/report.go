package main

import (
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/headrace/headrace/test/lab/script"
)

// report reads what a machine says, counts its tests and copies what a person wants to see.
type report struct {
	prefix  string
	verbose bool
	lax     bool           // a step whose filter matches nothing is no error: the person named the tests
	absent  *regexp.Regexp // tests that may skip
	out     io.Writer
	mu      *sync.Mutex // of out, which the machines share

	status                  int // -1 until the machine gave one
	passed, failed, skipped int // tests at the top level; skipped: those that had to run
	unmatched               int // steps that ran no test
}

// result is a line that ends a test.
var result = regexp.MustCompile(`^( *)--- (PASS|FAIL|SKIP): (\S+)`)

func (r *report) line(line string) {
	line = strings.TrimRight(line, "\r")
	if v, ok := strings.CutPrefix(line, script.ExitMark); ok {
		if n, err := strconv.Atoi(v); err == nil {
			r.status = n
		}
		return
	}
	show := r.verbose || !strings.HasPrefix(line, "=== ") && line != "" && line != "PASS"
	if m := result.FindStringSubmatch(line); m != nil {
		top := m[1] == ""
		switch {
		case m[2] == "PASS":
			if top {
				r.passed++
			}
			show = r.verbose
		case m[2] == "FAIL":
			if top {
				r.failed++
			}
		case r.absent != nil && r.absent.MatchString(m[3]):
		default:
			r.skipped++
			line += " (nothing may skip in the lab)"
		}
	}
	if strings.HasPrefix(line, "testing: warning: no tests to run") {
		r.unmatched++
		show = show && !r.lax
	}
	if show {
		r.mu.Lock()
		fmt.Fprintln(r.out, r.prefix+line)
		r.mu.Unlock()
	}
}

// err says why the machine's part did not hold.
func (r *report) err() error {
	switch {
	case r.status < 0:
		return fmt.Errorf("it ended without a status")
	case r.failed > 0 || r.skipped > 0:
		return fmt.Errorf("%d tests failed, %d skipped", r.failed, r.skipped)
	case r.status != 0:
		return fmt.Errorf("a command failed with status %d", r.status)
	case r.unmatched > 0 && !r.lax:
		return fmt.Errorf("%d steps ran no test: is the filter right?", r.unmatched)
	}
	return nil
}
