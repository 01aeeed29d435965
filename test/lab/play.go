package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/headrace/headrace/test/lab/script"
)

// grace is how long a machine may go on when the other one's part has not held: it may be waiting for it.
const grace = 20 * time.Second

// play runs a scenario and gives how many tests passed.
func play(ctx context.Context, o *options, s *scenario, k *kernel, b *builder) (tests int, err error) {
	limit := s.limit(o)
	emu, err := findEmulator(ctx, b.cache, s.emulates)
	if err != nil {
		return 0, err
	}
	dir := filepath.Join(b.dir, s.name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return 0, err
	}
	initrd := filepath.Join(dir, "initrd")
	m, loaded, err := s.image(ctx, k, b)
	if err != nil {
		return 0, err
	}
	text, err := json.Marshal(s.script(o, loaded, limit))
	if err != nil {
		return 0, err
	}
	m.put(script.Path, entry{mode: modeFile, data: text})
	if err := m.writeFile(initrd); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	reports, cpu, errs := s.boot(ctx, cancel, o, emu, k.vmlinuz, initrd, dir)
	for _, r := range reports {
		tests += r.passed
	}
	if !o.keep {
		errs = append(errs, os.RemoveAll(dir))
	}
	if err := errors.Join(errs...); err != nil {
		return tests, err
	}
	took := time.Since(began).Seconds()
	fmt.Printf("lab: %s: passed, %d tests, %.1f s, %.1f processors busy\n", s.name, tests, took, cpu.Seconds()/took)
	return tests, nil
}

// speaking is held by who writes a line.
var speaking sync.Mutex

// boot runs the machines side by side until all have ended. cpu is what they took of the host's processors.
func (s *scenario) boot(ctx context.Context, cancel func(), o *options, emu *emulator, vmlinuz, initrd, dir string) (_ []*report, cpu time.Duration, _ []error) {
	n := s.count()
	reports, errs, took := make([]*report, n), make([]error, n), make([]time.Duration, n)
	var absent *regexp.Regexp
	if s.absent != "" {
		absent = regexp.MustCompile(s.absent)
	}
	var wg sync.WaitGroup
	for i := range n {
		r := &report{verbose: o.verbose, lax: o.run != "", absent: absent, out: os.Stdout, mu: &speaking, status: -1}
		if s.light { // others speak too
			r.prefix = s.name + ": "
		}
		if n > 1 {
			r.prefix += fmt.Sprintf("vm%d: ", i+1)
		}
		reports[i] = r
		m := machine{scenario: s, number: i + 1, kernel: vmlinuz, initrd: initrd, dir: dir, accel: o.accel, emulator: emu, report: r}
		wg.Go(func() {
			err := m.run(ctx)
			r.end()
			if err == nil {
				err = r.err()
			}
			if err != nil {
				err = r.explain(err)
				if n > 1 {
					err = fmt.Errorf("machine %d: %w", i+1, err)
					time.AfterFunc(grace, cancel)
				}
			}
			errs[i] = err
			took[i] = m.cpu
		})
	}
	wg.Wait()
	for _, d := range took {
		cpu += d
	}
	return reports, cpu, errs
}
