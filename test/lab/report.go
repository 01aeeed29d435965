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

	current string              // the test that speaks
	tails   map[string][]string // what each test that has not ended said last: at most tailMax lines
	broken  []string            // what failed tests said
	held    []remark            // of tests that may skip and have not ended
	spared  []string            // why tests skipped that may
}

// tailMax is how many lines are repeated of a test that failed: a long run is read from its end.
const tailMax = 12

// remark is a line that a test logged.
type remark struct{ test, line string }

var (
	speaks  = regexp.MustCompile(`^=== (?:RUN|NAME|PAUSE|CONT) +(\S+)`) // a line that says whose the next ones are
	result  = regexp.MustCompile(`^( *)--- (PASS|FAIL|SKIP): (\S+)`)    // a line that ends a test
	journal = regexp.MustCompile(`level=(?:DEBUG|INFO) `)               // a line of a daemon's log
	place   = regexp.MustCompile(`^ +\S+\.go:\d+: `)                    // what a logged line begins with
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
	ended := result.FindStringSubmatch(line)
	switch speaker := speaks.FindStringSubmatch(line); {
	case speaker != nil:
		r.current = speaker[1]
	case ended != nil:
		line, show = r.ended(ended, line, show)
	default:
		if !journal.MatchString(line) {
			r.keep(line)
		}
		if strings.HasPrefix(line, "    ") && r.maySkip(r.current) {
			r.held = append(r.held, remark{r.current, line})
			show = r.verbose // else when it is known how the test ended
		}
	}
	if strings.HasPrefix(line, "testing: warning: no tests to run") {
		r.unmatched++
		show = show && !r.lax
	}
	if show {
		r.print(line)
	}
}

// ended takes a line that ends a test, with what result found in it. It gives back the line as it is to be printed, and whether it is.
func (r *report) ended(found []string, line string, show bool) (string, bool) {
	top, how, test := found[1] == "", found[2], found[3]
	spared := how == "SKIP" && r.maySkip(test)
	r.release(test, spared)
	if how == "FAIL" {
		r.broken = append(append(r.broken, r.tails[test]...), line)
	}
	delete(r.tails, test)
	switch {
	case how == "PASS":
		if top {
			r.passed++
		}
		show = r.verbose
	case how == "FAIL":
		if top {
			r.failed++
		}
	case spared:
		show = r.verbose
	default:
		r.skipped++
		line += " (nothing may skip in the lab)"
	}
	return line, show
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

// keep remembers a line for the end, in case its test fails.
func (r *report) keep(line string) {
	if r.tails == nil {
		r.tails = make(map[string][]string)
	}
	tail := r.tails[r.current]
	if len(tail) == tailMax {
		tail = slices.Delete(tail, 0, 1)
	}
	r.tails[r.current] = append(tail, line)
}

// explain adds to why the machine's part did not hold what was said last by the tests that failed, or by what died.
func (r *report) explain(err error) error {
	lines := r.broken
	if r.status != 0 && len(lines) == 0 {
		lines = r.tails[r.current]
	}
	if len(lines) == 0 {
		return err
	}
	return fmt.Errorf("%w; said last:\n%s", err, strings.Join(lines, "\n"))
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
