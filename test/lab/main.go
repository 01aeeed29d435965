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
	"sync"
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
	b := newBuilder(ctx, work, cache, o.race)
	defer b.close()
	for _, s := range todo {
		b.want(s)
	}
	passed, failures, tests := playAll(ctx, todo, func(s *scenario) (int, error) { return play(ctx, o, s, k, b) })
	fmt.Printf("lab: %.0f s, %.0f s of them waiting for the compiler; %d scenarios passed, %d failed, %d tests\n", time.Since(began).Seconds(), b.spent.Seconds(), passed, len(failures), tests)
	switch {
	case len(failures) > 0 || passed < len(todo): // who sees only the end of a long log sees what failed
		return errors.Join(append(failures, fmt.Errorf("%d of %d scenarios did not pass", len(todo)-passed, len(todo)))...)
	case o.run != "" && tests == 0:
		return fmt.Errorf("no test matches -run %s", o.run)
	}
	return nil
}

// lightsMax is how many light scenarios run side by side.
const lightsMax = 2

// playAll plays all scenarios until ctx ends, those first that want the host for themselves.
func playAll(ctx context.Context, todo []*scenario, play func(*scenario) (tests int, err error)) (passed int, failures []error, tests int) {
	var mu sync.Mutex // guards what is returned
	one := func(s *scenario) {
		if ctx.Err() != nil {
			return
		}
		n, err := play(s)
		mu.Lock()
		defer mu.Unlock()
		tests += n
		if err == nil {
			passed++
			return
		}
		err = fmt.Errorf("%s: FAILED: %w", s.name, err)
		failures = append(failures, err)
		fmt.Println("lab:", err)
	}
	lights := make(chan *scenario, len(todo))
	for _, s := range todo {
		if s.light {
			lights <- s
		} else {
			one(s)
		}
	}
	close(lights)
	var wg sync.WaitGroup
	for range lightsMax {
		wg.Go(func() {
			for s := range lights {
				one(s)
			}
		})
	}
	wg.Wait()
	return passed, failures, tests
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
