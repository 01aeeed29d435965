// Command lab proves the RDMA parts on any machine: it boots virtual machines with soft RoCE, under plain emulation where
// there is no KVM, and runs this repository's tests in them. Nothing is installed and nothing outside of the machines is
// touched: the kernel is Debian's own package, unpacked into the user's cache; the file system is built on the spot.
//
//	go run ./test/lab [-run REGEXP] [-timeout 10m] [PACKAGE...]
package main

import (
	"context"
	"encoding/json"
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

	"github.com/headrace/headrace/test/lab/script"
)

type options struct {
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
}

func main() {
	var o options
	flag.StringVar(&o.run, "run", "", "run only the tests that match")
	flag.StringVar(&o.bench, "bench", "", "run the benchmarks that match")
	flag.IntVar(&o.count, "count", 1, "run each test so many times")
	flag.BoolVar(&o.verbose, "v", false, "print every test")
	flag.BoolVar(&o.full, "full", false, "run everything at full length (HEADRACE_FULL)")
	flag.BoolVar(&o.race, "race", false, "build the tests with the race detector")
	flag.StringVar(&o.kernel, "kernel", "", "Debian kernel `package`; the release's own by default")
	// Not KVM by default: where this runs it is often there and does not work, and says so only by killing qemu.
	flag.StringVar(&o.accel, "accel", "tcg,thread=multi", "QEMU accelerator; kvm where it works")
	flag.BoolVar(&o.keep, "keep", false, "keep the machines' files and say where they are")
	flag.DurationVar(&o.timeout, "timeout", 10*time.Minute, "give up after")
	flag.Parse()
	if o.packages = flag.Args(); len(o.packages) == 0 {
		o.packages = []string{"./cgo", "./rdma"}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	status, err := lab(ctx, &o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		status = max(status, 1)
	}
	os.Exit(status) //nolint:gocritic // the deferred calls only end what ends with the process
}

func lab(ctx context.Context, o *options) (status int, err error) {
	for _, tool := range []struct{ program, pkg string }{
		{"qemu-system-x86_64", "qemu-system-x86"}, {"apt-get", "apt"}, {"dpkg", "dpkg"}, {"xz", "xz-utils"}, {"ip", "iproute2"}, {"rdma", "iproute2"},
	} {
		if lookup(tool.program) == "" {
			return 1, fmt.Errorf("%s is not here: apt-get install -y --no-install-recommends qemu-system-x86 xz-utils iproute2 libibverbs-dev ibverbs-providers", tool.program)
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return 1, err
	}
	cache = filepath.Join(cache, "headrace", "lab")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return 1, err
	}
	k, err := fetchKernel(ctx, cache, o.kernel)
	if err != nil {
		return 1, err
	}
	work, err := os.MkdirTemp("", "headrace-lab-")
	if err != nil {
		return 1, err
	}
	if o.keep {
		fmt.Fprintln(os.Stderr, "lab: the machines' files are in", work)
	} else {
		defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	}
	initrd, err := build(ctx, o, k, work)
	if err != nil {
		return 1, err
	}
	began := time.Now()
	m := machine{number: 1, of: 1, kernel: k.vmlinuz, initrd: initrd, dir: work, memory: "2048", accel: o.accel, out: os.Stdout, mu: &sync.Mutex{}}
	status, err = m.run(ctx)
	fmt.Fprintf(os.Stderr, "lab: the machine ran for %.1f s, status %d\n", time.Since(began).Seconds(), status)
	return status, err
}

// lookup finds a program, also where only root's PATH goes.
func lookup(name string) string {
	if p, err := exec.LookPath(name); err == nil {
		return p
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return filepath.Join(dir, name)
		}
	}
	return ""
}

// modules is what the machines need beside what the kernel has built in.
var modules = []string{"virtio_pci", "virtio_net", "crc32_generic", "crc32c_generic", "ib_uverbs", "rdma_ucm", "rdma_rxe", "dummy"}

// build compiles the tests and puts together the machines' file system.
func build(ctx context.Context, o *options, k *kernel, work string) (initrd string, err error) {
	m := newImage()
	s := script.Script{Machines: []script.Machine{{Setup: oneMachine}}}
	if s.Modules, err = k.load(m, modules...); err != nil {
		return "", err
	}
	for _, dir := range libraryDirs[:2] { // the provider of soft RoCE is opened at run time by libibverbs, and that by us
		found, err := filepath.Glob(filepath.Join(dir, "libibverbs/librxe-rdmav*.so"))
		if err != nil {
			return "", err
		}
		for _, lib := range append(found, findLibrary("libibverbs.so.1")) {
			if err := m.library(lib); err != nil {
				return "", err
			}
		}
	}
	m.put("/etc/libibverbs.d/rxe.driver", entry{mode: modeFile, data: []byte("driver rxe\n")})
	for _, p := range []string{"ip", "rdma"} {
		if err := m.program(lookup(p), "/bin/"+p); err != nil {
			return "", err
		}
	}
	for _, pkg := range o.packages {
		c, err := addTest(ctx, o, m, pkg, work)
		if err != nil {
			return "", err
		}
		s.Machines[0].Commands = append(s.Machines[0].Commands, c)
	}
	guest := filepath.Join(work, "init")
	if err := compile(ctx, []string{"CGO_ENABLED=0"}, "build", "-o", guest, "./test/lab/guest"); err != nil {
		return "", err
	}
	m.put("/init", entry{mode: modeExec, from: guest})
	text, err := json.Marshal(s)
	if err != nil {
		return "", err
	}
	m.put(script.Path, entry{mode: modeFile, data: text})
	initrd = filepath.Join(work, "initrd")
	return initrd, m.writeFile(initrd)
}

// oneMachine is the network of a machine that talks to itself.
var oneMachine = [][]string{
	{"ip", "link", "set", "lo", "up"},
	{"ip", "link", "add", "d0", "type", "dummy"},
	{"ip", "link", "set", "d0", "mtu", "4200", "up"},
	{"ip", "addr", "add", "10.9.0.1/24", "dev", "d0"},
	{"rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "d0"},
}

func addTest(ctx context.Context, o *options, m *image, pkg, work string) (c script.Command, err error) {
	dir, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", pkg).Output()
	if err != nil {
		return c, fmt.Errorf("find package %s: %w", pkg, err)
	}
	name := strings.ReplaceAll(strings.Trim(pkg, "./"), "/", "-") + ".test"
	args := []string{"test", "-c", "-o", filepath.Join(work, name)}
	if o.race {
		args = append(args, "-race")
	}
	if err := compile(ctx, []string{"CGO_ENABLED=1"}, append(args, pkg)...); err != nil {
		return c, err
	}
	if err := m.program(filepath.Join(work, name), "/bin/"+name); err != nil {
		return c, err
	}
	c = script.Command{Dir: "/work/" + name, Env: []string{"HEADRACE_LAB=1"}}
	m.dir(strings.TrimPrefix(c.Dir, "/"))
	data := filepath.Join(strings.TrimSpace(string(dir)), "testdata")
	if files, err := os.ReadDir(data); err == nil {
		for _, f := range files {
			if f.Type().IsRegular() {
				m.put(filepath.Join(c.Dir, "testdata", f.Name()), entry{mode: modeFile, from: filepath.Join(data, f.Name())})
			}
		}
	}
	if o.full {
		c.Env = append(c.Env, "HEADRACE_FULL=1")
	}
	const margin = 30 * time.Second // for booting, so that a test that hangs says where
	c.Args = []string{"/bin/" + name, fmt.Sprintf("-test.timeout=%v", max(o.timeout-margin, margin)), fmt.Sprintf("-test.count=%d", o.count), "-test.run=" + o.run}
	if o.verbose {
		c.Args = append(c.Args, "-test.v")
	}
	if o.bench != "" {
		c.Args = append(c.Args, "-test.bench="+o.bench)
	}
	return c, nil
}

func compile(ctx context.Context, env []string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}
