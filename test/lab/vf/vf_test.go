package vf

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/rdma"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

// patience is for whatever is waited for: the machine is emulated.
const patience = 60 * time.Second

// physical names the card's interface and its PCI function, without any virtual ones: what an earlier test left is put back,
// and so is what this one leaves, which has failed then.
func physical(t *testing.T) (netdev, dir string) {
	t.Helper()
	netdev = os.Getenv("LAB_PF")
	if netdev == "" {
		t.Skip("no card with SR-IOV here: make lab ARGS='-scenario vf' has one")
	}
	dir, err := filepath.EvalSymlinks("/sys/class/net/" + netdev + "/device")
	if err != nil {
		t.Fatal(err)
	}
	clear := func() (n int) {
		if n = functions(t, dir); n > 0 {
			if err := os.WriteFile(dir+"/sriov_numvfs", []byte("0"), 0); err != nil {
				t.Error(err)
			}
		}
		return n
	}
	if n := clear(); n > 0 {
		t.Logf("%d functions were left by who was here before", n)
	}
	t.Cleanup(func() {
		if n := clear(); n > 0 && !t.Failed() {
			t.Errorf("%d functions are left", n)
		}
	})
	t.Cleanup(func() { // while they are there
		if t.Failed() {
			explain(t)
		}
	})
	return netdev, dir
}

// explain prints what the machine says of its interfaces.
func explain(t *testing.T) {
	for _, words := range []string{
		"ip -s addr", "ip -s neigh", "ip route show table all", "rdma link", "rdma resource show qp", "rdma statistic show",
	} {
		args := strings.Fields(words)
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		t.Logf("%s: %v\n%s", words, err, out)
	}
	settings, _ := filepath.Glob("/proc/sys/net/ipv4/conf/*/accept_local")
	for _, f := range settings {
		b, err := os.ReadFile(f)
		t.Logf("%s: %v: %s", f, err, b)
	}
	log := make([]byte, 1<<18)
	n, err := unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, log)
	lines := strings.Split(string(log[:max(0, n)]), "\n")
	t.Logf("the end of the kernel's log: %v\n%s", err, strings.Join(lines[max(0, len(lines)-60):], "\n"))
}

func functions(t *testing.T, dir string) int {
	t.Helper()
	b, err := os.ReadFile(dir + "/sriov_numvfs")
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// asUdevWould puts soft RoCE on the functions' interfaces when they appear. Both ends of a transfer are on this machine: its
// own addresses must be taken for those of the wire's other end.
func asUdevWould(t *testing.T, dir string) {
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { stop(); wg.Wait() })
	wg.Go(func() {
		look := time.NewTicker(20 * time.Millisecond)
		defer look.Stop()
		done := make(map[string]bool)
		var failed map[string]error // at the last try, by folder: an interface is there before its settings are, and an RDMA device's name is free only when the old one is gone
		for {
			select {
			case <-ctx.Done():
				for f, err := range failed {
					if _, gone := os.Stat(f); gone == nil {
						t.Error(err)
					}
				}
				return
			case <-look.C:
			}
			failed = make(map[string]error)
			found, _ := filepath.Glob(dir + "/virtfn*/net/*")
			for _, f := range found {
				b, err := os.ReadFile(f + "/ifindex") // each interface has its own, also of a function made anew
				if index := string(b); err == nil && !done[index] {
					if err := dress(filepath.Base(f)); err != nil {
						failed[f] = err
						continue
					}
					done[index] = true
				}
			}
		}
	})
}

// dress gives an interface its settings and a soft RoCE device.
func dress(name string) error {
	for setting, value := range map[string]string{"accept_local": "1", "rp_filter": "0", "arp_ignore": "1"} {
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+name+"/"+setting, []byte(value), 0); err != nil {
			return err
		}
	}
	if out, err := exec.Command("rdma", "link", "add", "rxe_"+name, "type", "rxe", "netdev", name).CombinedOutput(); err != nil {
		return fmt.Errorf("soft RoCE on %s: %w: %s", name, err, out)
	}
	return nil
}

func wanted(pf string, devices ...string) rdma.Config {
	return rdma.Config{VFs: []rdma.VFs{{PF: pf, Count: 2}}, VFMTU: 1600, Devices: devices,
		VFAddresses: []netip.Prefix{netip.MustParsePrefix("10.9.9.1/24"), netip.MustParsePrefix("10.9.9.2/24")}}
}

// used lists the devices of the ports that are used, and wants them to be virtual functions.
func used(t *testing.T, tr transfer.Transport) (devices, netdevs []string) {
	t.Helper()
	for _, p := range tr.(transfer.Porter).Ports() {
		t.Logf("%+v", p)
		if !p.Used {
			continue
		}
		if p.PhysicalFunction == "" || !strings.Contains(p.Reason, "on a virtual function that this daemon made") || p.MTU != 1024 {
			t.Errorf("%+v", p)
		}
		devices, netdevs = append(devices, p.Device), append(netdevs, p.Netdev)
	}
	return devices, netdevs
}

func bytesInto(t *testing.T, netdev string) int {
	t.Helper()
	b, err := os.ReadFile("/sys/class/net/" + netdev + "/statistics/rx_bytes")
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// trafficClass is DSCP 26.
const trafficClass = 104

// countTrafficClass counts what comes into an interface with that class.
func countTrafficClass(t *testing.T, netdev string) func() int {
	t.Helper()
	tc := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("tc", args...).CombinedOutput()
		if err != nil {
			t.Fatalf("tc %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	tc("qdisc", "add", "dev", netdev, "ingress")
	tc("filter", "add", "dev", netdev, "parent", "ffff:", "protocol", "ip", "u32", "match", "ip", "tos", strconv.Itoa(trafficClass), "0xfc", "action", "pass")
	return func() (sum int) {
		t.Helper()
		for line := range strings.Lines(tc("-s", "filter", "show", "dev", netdev, "parent", "ffff:")) {
			var bytes, packets int
			if n, _ := fmt.Sscanf(strings.TrimSpace(line), "Sent %d bytes %d pkt", &bytes, &packets); n == 2 {
				sum += bytes
			}
		}
		return sum
	}
}

// Two daemons, each on a virtual function of the same card: what one sends goes through the card's switch to the other.
func TestTransferBetweenVirtualFunctions(t *testing.T) {
	pf, dir := physical(t)
	asUdevWould(t, dir)
	both := rdma.New(wanted(pf)) // holds the functions while the others come and go
	t.Cleanup(func() {
		if err := both.Close(); err != nil { // once more is nothing
			t.Error(err)
		}
	})
	if err := both.Probe(); err != nil {
		t.Fatal(err)
	}
	devices, netdevs := used(t, both)
	if len(devices) != 2 || functions(t, dir) != 2 {
		t.Fatalf("%d functions, devices %v", functions(t, dir), devices)
	}
	i, gid := 0, 1 // the IPv4 address: 0 is the link-local one
	f := transporttest.Factory{
		New: func() transfer.Transport {
			cfg := wanted(pf, devices[i%2])
			cfg.GIDIndex, cfg.PKey, cfg.ServiceLevel, cfg.TrafficClass, cfg.Spin = &gid, 0x7fff, 3, trafficClass, 50*time.Microsecond
			i++
			return rdma.New(cfg)
		},
		Config: func(c *transfer.Config) {
			c.FenceGrace, c.DeadAfter, c.DialTimeout = time.Second, 20*time.Second, 20*time.Second
		},
	}
	counted := countTrafficClass(t, netdevs[1])
	before := bytesInto(t, netdevs[1])
	p := transporttest.NewPair(t, f, transporttest.Options{})
	const rounds, tokens = 5, 300
	for range rounds {
		q := p.NewRequest(transporttest.NewRand(), tokens, 0, patience)
		q.Present(t, nil)
		q.Bind(t)
		q.PushAll(t, []byte("record"))
		q.Settled(t, []byte("record"))
	}
	payload := int(p.D.Engine.Status().Totals.BytesLanded)
	if got := bytesInto(t, netdevs[1]) - before; payload == 0 || got < payload {
		t.Errorf("%d bytes landed, %d came into %s", payload, got, netdevs[1])
	} else {
		t.Logf("%d bytes landed, %d came into %s", payload, got, netdevs[1])
	}
	if got := counted(); got < payload {
		t.Errorf("%d bytes came with traffic class %d, %d landed", got, trafficClass, payload)
	}
	p.Close(t)
	if n := functions(t, dir); n != 2 {
		t.Errorf("%d functions while a daemon holds them", n)
	}
	if err := both.Close(); err != nil {
		t.Error(err)
	}
	if n := functions(t, dir); n != 0 {
		t.Errorf("%d functions are left", n)
	}
}

const childVariable = "HEADRACE_TEST_HOLD_VFS"

// TestHold is the process that TestKilled kills.
func TestHold(t *testing.T) {
	pf := os.Getenv(childVariable)
	if pf == "" {
		return // in place of a skip: it is no test
	}
	if err := rdma.New(wanted(pf)).Probe(); err != nil {
		t.Fatal(err)
	}
	fmt.Println("\nholding")
	<-t.Context().Done()
}

// What a killed daemon made is put back by the next one, and what somebody else made is not.
func TestKilled(t *testing.T) {
	pf, dir := physical(t)
	hold := func() {
		t.Helper()
		cmd := exec.Command(os.Args[0], "-test.run=^TestHold$")
		cmd.Env, cmd.Stderr = append(os.Environ(), childVariable+"="+pf), os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // once more is nothing
		held := false
		for lines := bufio.NewScanner(out); !held && lines.Scan(); {
			held = lines.Text() == "holding"
		}
		if n := functions(t, dir); !held || n != 2 {
			t.Fatalf("held %v, %d functions", held, n)
		}
		cmd.Process.Kill()
		cmd.Wait()
		if n := functions(t, dir); n != 2 {
			t.Fatalf("%d functions after kill -9: it put them back itself", n)
		}
	}
	look := func(cfg rdma.Config) error {
		tr := rdma.New(cfg)
		err := tr.Probe()
		if cerr := tr.Close(); cerr != nil {
			t.Error(cerr)
		}
		return err
	}
	asUdevWould(t, dir)
	hold()
	_ = look(rdma.Config{}) // it finds no port, and is asked for no function
	if n := functions(t, dir); n != 0 {
		t.Fatalf("%d functions of a killed daemon are left", n)
	}
	hold()
	set := func(n string) {
		t.Helper()
		if err := os.WriteFile(dir+"/sriov_numvfs", []byte(n), 0); err != nil {
			t.Fatal(err)
		}
	}
	set("0")
	set("2") // as many, by somebody else
	_ = look(rdma.Config{})
	if n := functions(t, dir); n != 2 {
		t.Fatalf("%d of somebody else's 2 functions are left", n)
	}
	if err := look(wanted(pf)); err == nil || !strings.Contains(err.Error(), "somebody else made") {
		t.Error(err)
	}
	if n := functions(t, dir); n != 2 {
		t.Fatalf("%d of somebody else's 2 functions are left", n)
	}
	set("0")
	if err := look(rdma.Config{VFs: []rdma.VFs{{PF: pf, Count: 8}}}); err == nil || !strings.Contains(err.Error(), "it can have 7 (sriov_totalvfs)") {
		t.Error(err)
	}
}

// daemon is a running headrace node.
type daemon struct {
	cmd   *exec.Cmd
	url   string
	log   string // a file
	ended chan error
}

func startDaemon(t *testing.T, args ...string) *daemon {
	t.Helper()
	bin := os.Getenv("HEADRACE_BIN")
	if bin == "" {
		t.Fatal("HEADRACE_BIN names no binary")
	}
	dir := t.TempDir()
	ready := filepath.Join(dir, "ready")
	d := &daemon{log: filepath.Join(dir, "log"), ended: make(chan error, 1)}
	log, err := os.Create(d.log)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	d.cmd = exec.Command(bin, append([]string{"node", "--id", "n", "--data-dir", dir, "--ready-file", ready, "--listen", "127.0.0.1:0"}, args...)...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	go func() { d.ended <- d.cmd.Wait(); close(gone) }()
	t.Cleanup(func() { d.cmd.Process.Kill(); <-gone }) // where the test did not get so far
	var said struct{ URL string }
	for look, end := time.NewTicker(50*time.Millisecond), time.After(patience); said.URL == ""; {
		select {
		case <-look.C:
			if b, err := os.ReadFile(ready); err == nil {
				_ = json.Unmarshal(b, &said) // half written: again
			}
		case err := <-d.ended:
			t.Fatalf("it ended: %v\n%s", err, d.said())
		case <-end:
			t.Fatalf("it is not ready\n%s", d.said())
		}
	}
	d.url = said.URL
	return d
}

func (d *daemon) said() []byte {
	b, _ := os.ReadFile(d.log)
	return b
}

// stop asks it to end and waits.
func (d *daemon) stop(t *testing.T) {
	t.Helper()
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-d.ended:
		if err != nil {
			t.Errorf("%v\n%s", err, d.said())
		}
	case <-time.After(patience):
		t.Fatalf("it does not end\n%s", d.said())
	}
}

// The program makes them by its flags, shows them and puts them back when it is told to stop.
func TestDaemon(t *testing.T) {
	pf, dir := physical(t)
	asUdevWould(t, dir)
	d := startDaemon(t, "--transport", "rdma", "--rdma-vfs", pf+"=2", "--rdma-vf-addresses", "10.9.9.1/24,10.9.9.2/24", "--rdma-vf-mtu", "1600", "--rdma-devices", pf)
	res, err := http.Get(d.url + "/status")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var status struct {
		Transports []struct {
			Name   string
			Usable bool
			Ports  []transfer.PortStatus
		}
	}
	if err := json.NewDecoder(res.Body).Decode(&status); err != nil {
		t.Fatal(err)
	}
	virtual := 0
	for _, tr := range status.Transports {
		for _, p := range tr.Ports {
			t.Logf("%s: %+v", tr.Name, p)
			if p.Used && p.PhysicalFunction != "" && strings.HasPrefix(p.GID, "10.9.9.") {
				virtual++
			}
		}
	}
	if virtual != 2 || functions(t, dir) != 2 {
		t.Errorf("%d ports, %d functions\n%s", virtual, functions(t, dir), d.said())
	}
	d.stop(t)
	if n := functions(t, dir); n != 0 {
		t.Errorf("%d functions are left\n%s", n, d.said())
	}
}

// A daemon's successor has the same functions: they outlive the first and go with the second.
func TestUpgrade(t *testing.T) {
	pf, dir := physical(t)
	asUdevWould(t, dir)
	args := []string{"--transport", "rdma", "--rdma-vfs", pf + "=2", "--rdma-vf-addresses", "10.9.9.1/24,10.9.9.2/24", "--rdma-vf-mtu", "1600", "--takeover", "--socket", filepath.Join(t.TempDir(), "node.sock")}
	old := startDaemon(t, args...)
	next := startDaemon(t, args...)
	select {
	case err := <-old.ended:
		if err != nil {
			t.Errorf("the old one: %v\n%s", err, old.said())
		}
	case <-time.After(patience):
		t.Fatalf("the old one does not end\n%s", old.said())
	}
	if n := functions(t, dir); n != 2 {
		t.Errorf("%d functions are left to the successor\n%s\n%s", n, old.said(), next.said())
	}
	next.stop(t)
	if n := functions(t, dir); n != 0 {
		t.Errorf("%d functions are left\n%s", n, next.said())
	}
}
