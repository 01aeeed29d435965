// Command lab proves the RDMA parts on any machine: it boots virtual machines with soft RoCE, under plain emulation where
// there is no KVM, and runs this repository's tests in them. Nothing is installed and nothing outside of the machines is
// touched: the kernel is Debian's own package, unpacked into the user's cache; the file system is built on the spot. What
// there is to run is data, in scenarios.go.
//
//	go run ./test/lab [-list] [-scenario NAME,...] [-v] [-run REGEXP] [-full] [PACKAGE...]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

type options struct {
	scenario string
	packages []string
	run      string
	bench    string
	count    int
	verbose  bool
	full     bool
	race     bool
	kernel   string
	accel    string
	keep     bool
	timeout  time.Duration
	args     string
}

func main() {
	var o options
	list := flag.Bool("list", false, "list the scenarios and end")
	flag.StringVar(&o.scenario, "scenario", "", "run only these `scenarios`, separated by commas")
	flag.StringVar(&o.run, "run", "", "run only the tests that match, in place of each step's own choice")
	flag.StringVar(&o.bench, "bench", "", "run the benchmarks that match, too")
	flag.IntVar(&o.count, "count", 1, "run each test so many times")
	flag.BoolVar(&o.verbose, "v", false, "print every test")
	flag.BoolVar(&o.full, "full", false, "run everything at full length (HEADRACE_FULL)")
	flag.BoolVar(&o.race, "race", false, "build the tests with the race detector")
	flag.StringVar(&o.kernel, "kernel", "", "Debian kernel `package`; the release's own by default")
	// Not KVM by default: where this runs it is often there and does not work, and says so only by killing qemu.
	flag.StringVar(&o.accel, "accel", "tcg,thread=multi", "QEMU accelerator; kvm where it works")
	flag.BoolVar(&o.keep, "keep", false, "keep the machines' files and say where they are")
	flag.DurationVar(&o.timeout, "timeout", 0, "give a scenario up after; its own limit by default")
	flag.StringVar(&o.args, "args", "", "arguments for the commands of the scenarios, in place of their own")
	flag.Parse()
	o.packages = flag.Args()
	if *list {
		for _, s := range scenarios {
			fmt.Printf("%-12s %s\n", s.name, s.about)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := lab(ctx, &o); err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1) //nolint:gocritic // the deferred call only ends what ends with the process
	}
}

// chosen gives the scenarios that the flags name: with packages those run in place of the scenario's tests.
func chosen(o *options) ([]*scenario, error) {
	all := scenarios
	if o.scenario != "" {
		all = nil
		for _, name := range strings.Split(o.scenario, ",") {
			found := false
			for _, s := range scenarios {
				if s.name == name {
					all, found = append(all, s), true
				}
			}
			if !found {
				return nil, fmt.Errorf("there is no scenario %q: -list names them", name)
			}
		}
	} else if len(o.packages) > 0 {
		all = []*scenario{{name: "packages", about: "what the command line names"}}
	}
	out := make([]*scenario, 0, len(all))
	for _, s := range all {
		if len(o.packages) > 0 {
			changed := *s
			changed.steps = nil
			for _, pkg := range o.packages {
				changed.steps = append(changed.steps, step{test: pkg})
			}
			s = &changed
		}
		if err := s.check(); err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

func lab(ctx context.Context, o *options) (err error) {
	began := time.Now()
	todo, err := chosen(o)
	if err != nil {
		return err
	}
	for _, tool := range []string{qemuProgram, "apt-get", "dpkg", "xz"} {
		if lookup(tool) == "" {
			return fmt.Errorf("%s is not here: let scripts/deps.sh lab install it", tool)
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return err
	}
	cache = filepath.Join(cache, "headrace", "lab")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	k, err := fetchKernel(ctx, cache, o.kernel)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "headrace-lab-")
	if err != nil {
		return err
	}
	if o.keep {
		fmt.Fprintln(os.Stderr, "lab: the machines' files are in", work)
	} else {
		defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	}
	b := newBuilder(work, cache, o.race)
	passed, failed, tests := 0, 0, 0
	for _, s := range todo {
		n, err := play(ctx, o, s, k, b)
		tests += n
		if err != nil {
			failed++
			fmt.Printf("lab: %s: FAILED: %v\n", s.name, err)
		} else {
			passed++
		}
		if ctx.Err() != nil {
			break
		}
	}
	fmt.Printf("lab: %.0f s, %.0f s of them compiling; %d scenarios passed, %d failed, %d tests\n", time.Since(began).Seconds(), b.spent.Seconds(), passed, failed, tests)
	switch {
	case failed > 0 || passed < len(todo):
		return fmt.Errorf("%d of %d scenarios did not pass", len(todo)-passed, len(todo))
	case o.run != "" && tests == 0:
		return fmt.Errorf("no test matches -run %s", o.run)
	}
	return nil
}

// lookup finds a program, also where only root's PATH goes.
func lookup(name string) string {
	if p, err := exec.LookPath(name); err == nil {
		return p
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if file := filepath.Join(dir, name); exists(file) {
			return file
		}
	}
	return ""
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}
