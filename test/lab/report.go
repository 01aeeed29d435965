package main

import (
	"fmt"
	"io"
	"regexp"
	"slices"
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

	current string   // the test that speaks
	held    []remark // of tests that may skip and have not ended
	spared  []string // why tests skipped that may
}

// remark is a line that a test logged.
type remark struct{ test, line string }

var (
	speaks = regexp.MustCompile(`^=== (?:RUN|NAME|PAUSE|CONT) +(\S+)`) // a line that says whose the next ones are
	result = regexp.MustCompile(`^( *)--- (PASS|FAIL|SKIP): (\S+)`)    // a line that ends a test
	place  = regexp.MustCompile(`^ +\S+\.go:\d+: `)                    // what a logged line begins with
)

func (r *report) line(line string) {
	line = strings.TrimRight(line, "\r")
	if v, ok := strings.CutPrefix(line, script.ExitMark); ok {
		if n, err := strconv.Atoi(v); err == nil {
			r.status = n
		}
		return
	}
	show := r.verbose || !strings.HasPrefix(line, "=== ") && line != "" && line != "PASS"
	if m := speaks.FindStringSubmatch(line); m != nil {
		r.current = m[1]
	}
	if m := result.FindStringSubmatch(line); m != nil {
		top := m[1] == ""
		spared := m[2] == "SKIP" && r.maySkip(m[3])
		r.release(m[3], spared)
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
		case spared:
			show = r.verbose
		default:
			r.skipped++
			line += " (nothing may skip in the lab)"
		}
	} else if strings.HasPrefix(line, "    ") && r.maySkip(r.current) {
		r.held = append(r.held, remark{r.current, line})
		show = r.verbose // else when it is known how the test ended
	}
	if strings.HasPrefix(line, "testing: warning: no tests to run") {
		r.unmatched++
		show = show && !r.lax
	}
	if show {
		r.print(line)
	}
}

func (r *report) print(line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintln(r.out, r.prefix+line)
}

func (r *report) maySkip(test string) bool {
	return r.absent != nil && test != "" && r.absent.MatchString(test)
}

// release prints what was held of a test that ended, unless it skipped and may: then its last words say why.
func (r *report) release(test string, spared bool) {
	why := "no reason given"
	rest := r.held[:0]
	for _, h := range r.held {
		switch {
		case h.test != test:
			rest = append(rest, h)
		case spared:
			why = strings.TrimSpace(place.ReplaceAllString(h.line, ""))
		case !r.verbose:
			r.print(h.line)
		}
	}
	r.held = rest
	if spared {
		r.spared = append(r.spared, why)
	}
}

// end prints what is left to be said when the machine has ended: in one line, which tests skipped that may.
func (r *report) end() {
	for len(r.held) > 0 { // of tests that never ended
		r.release(r.held[0].test, false)
	}
	if len(r.spared) == 0 {
		return
	}
	counts := make(map[string]int)
	var whys []string
	for _, why := range r.spared {
		if counts[why]++; counts[why] == 1 {
			whys = append(whys, why)
		}
	}
	slices.SortStableFunc(whys, func(a, b string) int { return counts[b] - counts[a] })
	for i, why := range whys {
		whys[i] = fmt.Sprintf("%d: %s", counts[why], why)
	}
	r.print(fmt.Sprintf("lab: %d tests and parts of tests skipped that may: %s", len(r.spared), strings.Join(whys, "; ")))
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
