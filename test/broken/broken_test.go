package broken

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The machine has no package manager and no network: this one knows what the doctor may ask for, and puts back what
// was taken away.
const aptGet = `#!/bin/sh
case "$*" in
"install -y ibverbs-providers") mv /run/rxe.driver /etc/libibverbs.d/rxe.driver;;
"install -y libibverbs1 ibverbs-providers") mv /run/libibverbs.so.1 $(cat /run/libibverbs.path);;
"install -y chrony") mv /run/chronyc /bin/;;
*) echo "no such package: $*" >&2; exit 1;;
esac
`

// fault is one way to break a machine.
type fault struct {
	name   string
	breaks string // in root's shell
	shell  string // in the shell that the doctor is started from: limits are of processes
	user   bool   // the doctor is not root
	bin    string // another copy of the program
	args   string // for the doctor

	check, says, fix string // what the doctor is to name, and part of its command
	fill             string // in place of the words in capitals
	needed           bool   // RDMA does not work without: the exit status says so
	mend             string // what is left to be put back
}

var faults = []fault{
	{name: "interface is down", breaks: "ip link set d0 down", check: "rxe0/1 state", says: "d0 is switched off", fix: "ip link set dev d0 up", needed: true},
	{name: "no address", breaks: "ip addr del 10.9.0.1/24 dev d0", check: "rxe0/1 address", says: "only of the link", fix: "ip addr add", fill: "10.9.0.1/24", needed: true},
	{name: "MTU of 1500", breaks: "ip link set d0 mtu 1500", check: "rxe0/1 MTU", says: "1024 bytes; that of d0 is 1500", fix: "ip link set dev d0 mtu 4200"},
	{name: "little locked memory", shell: "ulimit -l 64", user: true, check: "locked memory", says: "64 KiB", fix: "ulimit -l unlimited", needed: true},
	{name: "few open files", shell: "ulimit -n 256", check: "open files", says: "up to 256", fix: "ulimit -n 65536"},
	{name: "no soft RoCE on the interface", breaks: "rdma link delete rxe0", check: "devices", says: "none", fix: "rdma link add rxe0 type rxe netdev d0", needed: true},
	{name: "module rdma_rxe is not loaded", breaks: "rdma link delete rxe0; rmmod rdma_rxe", check: "devices", says: "none", fix: "modprobe rdma_rxe", needed: true},
	{name: "module ib_uverbs is not loaded", breaks: "rdma link delete rxe0; rmmod rdma_rxe rdma_ucm ib_uverbs", check: "kernel modules", says: "ib_uverbs", fix: "modprobe ib_uverbs", needed: true,
		mend: "modprobe rdma_ucm; modprobe rdma_rxe; rdma link add rxe0 type rxe netdev d0"},
	{name: "device file is closed", breaks: "chmod 0600 /dev/infiniband/uverbs*", user: true, check: "device files", says: "may not open", fix: "chmod 0666", needed: true},
	{name: "device file is missing", breaks: "rm /dev/infiniband/uverbs*", check: "device files", says: "is not there", fix: "mknod", needed: true},
	{name: "provider is missing", breaks: "mv /etc/libibverbs.d/rxe.driver /run/", check: "providers", says: "none for rxe0", fix: "apt-get install", needed: true},
	{name: "library is missing", breaks: "find /lib /usr -name libibverbs.so.1 >/run/libibverbs.path; mv $(cat /run/libibverbs.path) /run/", check: "library", says: "libibverbs.so.1 cannot be opened", fix: "apt-get install", needed: true},
	{name: "no huge pages", breaks: "echo never > /sys/kernel/mm/transparent_hugepage/enabled", check: "huge pages", says: "none", fix: "echo"},
	{name: "small TCP buffers", breaks: "sysctl -w net.ipv4.tcp_wmem='4096 4096 65536'", check: "buffers", says: "64 KiB", fix: "sysctl -w"},
	{name: "eBPF is not allowed", breaks: "cp /bin/headrace /tmp/headrace", bin: "/tmp/headrace", user: true, check: "programs", says: "may not load", fix: "setcap"},
	{name: "no control groups", breaks: "umount /sys/fs/cgroup", check: "control groups", says: "not mounted", fix: "mount -t cgroup2"},
	{name: "probes are not allowed", breaks: "sysctl -w kernel.perf_event_paranoid=3", user: true, check: "probes", says: "is 3", fix: "sysctl -w"},
}

type check struct{ Group, Name, Answer, Detail, Remedy, Command, Host string }

func (c check) id() string { return c.Group + ": " + c.Name }

type report struct {
	OK     bool
	Checks []check
	status int
}

func (r *report) find(name string) (check, bool) {
	for _, c := range r.Checks {
		if c.Name == name {
			return c, true
		}
	}
	return check{}, false
}

// script runs commands as a person would: in a shell, each of which must succeed.
func script(text string) error {
	cmd := exec.Command("/bin/sh", "-e", "-c", text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", text, err, out)
	}
	return nil
}

// doctor runs the doctor from a shell that has done something before.
func doctor(t *testing.T, f *fault, before string) *report {
	t.Helper()
	bin, args := os.Getenv("HEADRACE_BIN"), " doctor --transport rdma --json"+f.args
	if f.bin != "" {
		bin = f.bin
	}
	run := bin + args
	if f.user {
		run = "su -s /bin/sh -c '" + run + "' user"
	}
	cmd := exec.Command("/bin/sh", "-e", "-c", before+"\nexec "+run)
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	r := &report{}
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		r.status = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(out.Bytes(), r); err != nil {
		t.Fatalf("after %q the doctor printed %q and %q, status %d: %v", before, out.String(), complaints.String(), r.status, err)
	}
	if r.OK != (r.status == 0) {
		t.Errorf("exit status %d of a report that is fine: %v", r.status, r.OK)
	}
	return r
}

// furnish makes a machine of the lab one that a person could work on: a shell, and modules that modprobe finds.
func furnish(t *testing.T) {
	t.Helper()
	if os.Getenv("HEADRACE_LAB") == "" {
		t.Skip("it breaks the machine that it runs on: run it in one of the lab's (make lab ARGS='-scenario doctor')")
	}
	if out, err := exec.Command("/bin/busybox", "--install", "-s", "/bin").CombinedOutput(); err != nil {
		t.Fatalf("install busybox: %v: %s", err, out)
	}
	// busybox's own shell prefers its own ip and tc to those of iproute2, which people have.
	if err := errors.Join(os.Remove("/bin/sh"), os.Symlink("/bin/dash", "/bin/sh")); err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{"/bin/apt-get": aptGet, "/etc/passwd": "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n"} {
		if err := os.WriteFile(file, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := script(`dir=/lib/modules/$(uname -r); mkdir -p $dir; for m in /lib/modules/*.ko; do ln -sf $m $dir/; done; depmod`); err != nil {
		t.Fatal(err)
	}
}

// TestBrokenHosts wants the right diagnosis for each fault, and the right cure.
func TestBrokenHosts(t *testing.T) {
	furnish(t)
	well := map[bool]*report{false: doctor(t, &fault{}, ""), true: doctor(t, &fault{user: true}, "ulimit -l unlimited; chmod 0666 /dev/infiniband/uverbs*; sysctl -w kernel.perf_event_paranoid=-1 >/dev/null")}
	for _, c := range well[false].Checks {
		t.Logf("%-8s %-30s %s", c.Answer, c.id(), c.Detail)
	}
	if well[false].status != 0 {
		t.Fatalf("the machine is not fine before anything is broken: status %d", well[false].status)
	}
	for i := range faults {
		f := &faults[i]
		t.Run(f.name, func(t *testing.T) { f.try(t, well[f.user]) })
	}
	t.Logf("%d faults", len(faults))
}

// TestVirtualFunctions is the same for a card that has some.
func TestVirtualFunctions(t *testing.T) {
	pf := os.Getenv("LAB_PF")
	if pf == "" {
		t.Skip("needs a card with virtual functions (make lab ARGS='-scenario doctor-vf')")
	}
	furnish(t)
	numvfs := " > /sys/class/net/" + pf + "/device/sriov_numvfs"
	f := fault{name: "none are made", args: " --transport auto", breaks: "echo 0" + numvfs + "; ip link set dev " + pf + " down",
		check: pf + " virtual functions", says: "none of 7 made, and " + pf + " is switched off", fix: "echo 4" + numvfs, mend: "echo 0" + numvfs}
	t.Run(f.name, func(t *testing.T) { f.try(t, doctor(t, &f, "")) })
}

func (f *fault) try(t *testing.T, well *report) {
	if err := script(f.breaks); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := script(f.mend); err != nil {
			t.Error(err)
		}
	}()
	ill := doctor(t, f, f.shell)
	c, there := ill.find(f.check)
	if !there || c.Answer != "no" && c.Answer != "needed" || !strings.Contains(c.Detail, f.says) || !strings.Contains(c.Command, f.fix) {
		t.Fatalf("the doctor says of it %+v (there: %v), want no with %q and a command with %q", c, there, f.says, f.fix)
	}
	if (c.Answer == "needed") != f.needed || (ill.status == 1) != f.needed {
		t.Errorf("the doctor says %q with status %d; needed for RDMA: %v", c.Answer, ill.status, f.needed)
	}
	fix := strings.ReplaceAll(c.Command, "ADDRESS/PREFIX", f.fill)
	t.Logf("%s\n  # %s", c.Detail, fix)
	var cured *report
	if f.shell != "" {
		cured = doctor(t, f, f.shell+"\n"+fix)
	} else {
		if err := script(fix); err != nil {
			t.Fatalf("the doctor's command fails: %v", err)
		}
		cured = doctor(t, f, "")
	}
	if c, _ := cured.find(f.check); c.Answer != "yes" {
		t.Errorf("after the cure the doctor says %+v", c)
	}
	if f.mend != "" {
		return // it takes more than one command
	}
	for _, was := range well.Checks {
		if c, _ := cured.find(was.Name); was.Answer == "yes" && c.Answer != "yes" {
			t.Errorf("after the cure %s is %q (%s), before the fault it was yes", was.id(), c.Answer, c.Detail)
		}
	}
}

// TestFaultsAreTold wants the table to be what it says, wherever it runs.
func TestFaultsAreTold(t *testing.T) {
	if len(faults) < 10 {
		t.Errorf("only %d faults", len(faults))
	}
	for _, f := range faults {
		if f.breaks == "" && f.shell == "" || f.check == "" || f.says == "" || f.fix == "" || f.bin != "" && !filepath.IsAbs(f.bin) {
			t.Errorf("fault %q says too little: %+v", f.name, f)
		}
	}
}
