package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/headrace/headrace/test/lab/script"
)

// scenario is one or two machines and what runs in them. Zero values are useful: one machine with one rail.
type scenario struct {
	name, about string
	machines    int               // 1 or 2, which a wire a rail joins; 0 is 1
	rails       int               // RDMA ports a machine, each with a subnet of its own; 0 is 1, -1 none
	modules     []string          // kernel modules beside baseModules
	programs    []string          // programs of this host beside basePrograms, with their libraries, in /bin
	headrace    bool              // the binary, in /bin, named by HEADRACE_BIN
	files       map[string]string // files or folders of this host, relative to the repository, by path in the machine
	memory      int               // MiB; 0 is 2048
	emulates    string            // a device that QEMU must have: where this host's has not, a newer one is fetched
	qemu        []string          // arguments for it, in all machines; {vm} is the machine's number
	env         []string          // of all steps
	setup       [][]string        // commands that must succeed first, in all machines, behind the rails' own
	steps       []step            // each machine runs its own, in this order
	absent      string            // regexp of tests that may skip: they need what an emulated machine cannot have
	timeout     time.Duration     // of the whole scenario; 0 is 20 minutes, for it may get what others leave of the host; ten times that with -full
	light       bool              // it leaves a processor free and measures no rates: another such one may run beside it
}

// step is a package's tests, or a command, in one machine or in all at the same time.
type step struct {
	on        int // machine, from 1; 0: all
	test      string
	run, skip string   // regexps, as go test -run and -skip have them
	short     bool     // go test -short, except with -full: for what is run at length elsewhere
	command   []string // in place of test
	args      []string // of it, unless -args names others
	env       []string
}

var (
	// baseModules are in every machine, beside what the kernel has built in.
	baseModules = []string{
		"virtio_pci", "virtio_net", "crc32_generic", "crc32c_generic", "ib_uverbs", "rdma_ucm", "rdma_rxe", "dummy", "veth", "vgem",
		"sch_netem", "sch_ingress", "sch_prio", "cls_u32", "cls_matchall", "cls_flower", "cls_bpf", "act_gact", "act_mirred", "act_bpf",
	}
	basePrograms = []string{"ip", "rdma", "tc", "ibv_devinfo"}
)

func (s *scenario) count() int { return max(s.machines, 1) }

// netdevs names the interfaces of a machine's rails.
func (s *scenario) netdevs() (names []string) {
	n := s.rails
	if n == 0 {
		n = 1
	}
	for i := range max(n, 0) {
		if s.count() > 1 {
			names = append(names, fmt.Sprintf("eth%d", i))
		} else {
			names = append(names, fmt.Sprintf("d%d", i))
		}
	}
	return names
}

// address is that of a rail in a machine; rails count from 0, machines from 1.
func address(rail, vm int) string { return fmt.Sprintf("10.9.%d.%d", rail, vm) }

// network sets up the rails: a dummy interface where a machine talks to itself, else the end of a wire.
func (s *scenario) network(vm int) [][]string {
	setup := [][]string{{"ip", "link", "set", "lo", "up"}}
	for i, dev := range s.netdevs() {
		if s.count() == 1 {
			setup = append(setup, []string{"ip", "link", "add", dev, "type", "dummy"})
		}
		setup = append(setup,
			[]string{"ip", "link", "set", dev, "mtu", "4200", "up"},
			[]string{"ip", "addr", "add", address(i, vm) + "/24", "dev", dev},
			[]string{"rdma", "link", "add", fmt.Sprintf("rxe%d", i), "type", "rxe", "netdev", dev})
	}
	return setup
}

func (s *scenario) environment(vm int) []string {
	env := []string{
		"HEADRACE_LAB=1", "LAB_SCENARIO=" + s.name, fmt.Sprintf("LAB_VM=%d", vm), fmt.Sprintf("LAB_MACHINES=%d", s.count()),
		"LAB_RAILS=" + strings.Join(s.netdevs(), ","),
	}
	if s.count() > 1 {
		var peers []string
		for i := range s.netdevs() {
			peers = append(peers, address(i, 3-vm))
		}
		env = append(env, "LAB_PEERS="+strings.Join(peers, ","), "LAB_HOSTS="+address(0, 1)+","+address(0, 2))
	}
	if s.headrace {
		env = append(env, "HEADRACE_BIN=/bin/headrace")
	}
	return append(env, s.env...)
}

// check finds what is wrong with the data.
func (s *scenario) check() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if !regexp.MustCompile(`^[a-z0-9-]+$`).MatchString(s.name) || s.about == "" {
		wrong("it needs a name of a-z, 0-9 and - and a line about it")
	}
	if s.machines < 0 || s.machines > 2 || s.rails < -1 || s.rails > 8 {
		wrong("%d machines with %d rails each: 1 or 2 with up to 8", s.machines, s.rails)
	}
	if len(s.steps) == 0 {
		wrong("no steps")
	}
	busy := make(map[int]bool)
	for _, st := range s.steps {
		if (st.test == "") == (len(st.command) == 0) || st.on < 0 || st.on > s.count() {
			wrong("a step is a test or a command in one of the machines: %+v", st)
		}
		for _, expr := range []string{st.run, st.skip} {
			if _, err := regexp.Compile(expr); err != nil {
				errs = append(errs, err)
			}
		}
		busy[st.on] = true
	}
	for vm := 1; vm <= s.count() && !busy[0]; vm++ {
		if !busy[vm] {
			wrong("machine %d has nothing to do", vm)
		}
	}
	if _, err := regexp.Compile(s.absent); err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("scenario %q: %w", s.name, err)
	}
	return nil
}

// script says what each machine does. loaded are the modules' files.
func (s *scenario) script(o *options, loaded []string, limit time.Duration) script.Script {
	out := script.Script{Modules: loaded}
	for vm := 1; vm <= s.count(); vm++ {
		m := script.Machine{Setup: append(s.network(vm), s.setup...)}
		env := s.environment(vm)
		if o.full {
			env = append(env, "HEADRACE_FULL=1")
		}
		for _, st := range s.steps {
			if st.on != 0 && st.on != vm {
				continue
			}
			args := st.args
			if o.args != "" {
				args = strings.Fields(o.args)
			}
			c := script.Command{Args: slices.Concat(st.command, args), Dir: "/tmp", Env: slices.Concat(env, st.env)}
			if st.test != "" {
				c.Dir, c.Args = workDir(st.test), o.testArgs(&st, limit)
			}
			m.Commands = append(m.Commands, c)
		}
		out.Machines = append(out.Machines, m)
	}
	return out
}

// testArgs runs a test binary with every test named, so that skips are seen.
func (o *options) testArgs(st *step, limit time.Duration) []string {
	const margin = 20 * time.Second // for booting, so that a test that hangs says where
	run := st.run
	if o.run != "" {
		run = o.run
	}
	args := []string{
		"/bin/" + testName(st.test), "-test.v", fmt.Sprintf("-test.timeout=%v", max(limit-margin, margin)),
		fmt.Sprintf("-test.count=%d", o.count), "-test.run=" + run, "-test.skip=" + st.skip,
	}
	if o.bench != "" {
		args = append(args, "-test.bench="+o.bench)
	}
	if st.short && !o.full {
		args = append(args, "-test.short")
	}
	return args
}

func workDir(pkg string) string { return "/work/" + testName(pkg) }

func testName(pkg string) string {
	return strings.ReplaceAll(strings.Trim(pkg, "./"), "/", "-") + ".test"
}

// limit is how long it may take.
func (s *scenario) limit(o *options) time.Duration {
	d := s.timeout
	switch {
	case o.timeout > 0:
		return o.timeout
	case d == 0:
		d = 20 * time.Minute
	}
	if o.full {
		d *= 10
	}
	return d
}

// image puts together the machines' file system: all machines have the same.
func (s *scenario) image(ctx context.Context, k *kernel, b *builder) (*image, []string, error) {
	m := newImage()
	loaded, err := k.load(m, append(slices.Clone(baseModules), s.modules...)...)
	if err != nil {
		return nil, nil, err
	}
	if err := m.verbs(); err != nil {
		return nil, nil, err
	}
	for _, p := range append(slices.Clone(basePrograms), s.programs...) {
		found := lookup(p)
		if found == "" {
			return nil, nil, fmt.Errorf("%s is not here: let scripts/deps.sh lab install it", p)
		}
		if err := m.program(found, "/bin/"+p); err != nil {
			return nil, nil, err
		}
	}
	for _, at := range slices.Sorted(maps.Keys(s.files)) {
		if err := m.tree(s.files[at], at); err != nil {
			return nil, nil, err
		}
	}
	if s.headrace {
		bin := b.headrace()
		if err := b.wait(ctx, bin); err != nil {
			return nil, nil, err
		}
		if err := m.program(bin.file, "/bin/headrace"); err != nil {
			return nil, nil, err
		}
	}
	for _, st := range s.steps {
		if st.test == "" {
			continue
		}
		t := b.test(st.test)
		if err := b.wait(ctx, t); err != nil {
			return nil, nil, err
		}
		if err := m.program(t.file, "/bin/"+testName(st.test)); err != nil {
			return nil, nil, err
		}
		m.dir(strings.TrimPrefix(workDir(st.test), "/"))
		if data := filepath.Join(t.dir, "testdata"); exists(data) {
			if err := m.tree(data, workDir(st.test)+"/testdata"); err != nil {
				return nil, nil, err
			}
		}
	}
	guest := b.guest()
	if err := b.wait(ctx, guest); err != nil {
		return nil, nil, err
	}
	m.put("/init", entry{mode: modeExec, from: guest.file})
	return m, loaded, nil
}
