package rdma

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
)

// fakeHost is a host with one physical function that makes virtual ones as the kernel does.
type fakeHost struct {
	t     *testing.T
	sys   sysfs
	state string
	fail  error
	life  int // of the functions: their folders are new each time
	did   []string
	down  bool
}

const pfAddress = "0000:3b:00.0"

func newFakeHost(t *testing.T) *fakeHost {
	sys := tree(t, map[string]string{
		pf + "/numa_node": "1", pf + "/sriov_totalvfs": "7", pf + "/sriov_numvfs": "0", pf + "/net/eth0/ifindex": "3",
		"devices/pci0000:3a/0000:3a:00.0/0000:3c:00.0/numa_node": "1",
		"bus/pci/devices/0000:3b:00.0":                           "->" + pf, "bus/pci/devices/0000:3c:00.0": "->devices/pci0000:3a/0000:3a:00.0/0000:3c:00.0",
		"class/infiniband/mlx5_0/device": "->" + pf, "class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0": "eth0",
		"class/net/eth0/device": "->" + pf, "class/net/lo/ifindex": "1", "class/iommu/dmar0/x": "1",
	})
	return &fakeHost{t: t, sys: sys, state: t.TempDir()}
}

// daemon is one life of a daemon.
func (h *fakeHost) daemon() *keeper {
	k := &keeper{sys: h.sys, dir: h.state, write: h.write, links: h, wait: time.Second, log: slog.New(slog.DiscardHandler)}
	k.ready = func(vf, netdev string) bool { return true }
	h.t.Cleanup(func() { h.kill(k) })
	return k
}

// kill ends a daemon as the kernel does: its locks are gone, and nothing else.
func (h *fakeHost) kill(k *keeper) {
	for _, g := range k.held {
		g.file.Close()
	}
	k.held = nil
}

func (h *fakeHost) made() int { return h.sys.functionsOf(pfAddress).made }

func (h *fakeHost) write(file, text string) error {
	if h.fail != nil {
		return h.fail
	}
	n, err := strconv.Atoi(text)
	if err != nil || file != h.sys.path("bus/pci/devices", pfAddress, "sriov_numvfs") {
		h.t.Errorf("wrote %q to %s", text, file)
	}
	if n > 0 && h.made() > 0 {
		return unix.EBUSY
	}
	for _, vf := range h.sys.virtual(pfAddress) {
		// Kept, so that its number is not given to another folder: the kernel counts on.
		must(h.t, os.Rename(h.sys.path("devices/pci0000:3a/0000:3a:00.0", vf), h.sys.path(fmt.Sprintf("gone-%d-%s", h.life, vf))))
		os.Remove(h.sys.path("bus/pci/devices", vf))
	}
	links, _ := filepath.Glob(h.sys.path(pf, "virtfn*"))
	for _, l := range links {
		os.Remove(l)
	}
	h.life++
	for i := range n {
		vf := fmt.Sprintf("0000:3b:00.%d", i+1)
		dir := h.sys.path("devices/pci0000:3a/0000:3a:00.0", vf)
		must(h.t, os.MkdirAll(filepath.Join(dir, "net", fmt.Sprintf("vf%d", i)), 0o755))
		must(h.t, os.Symlink(h.sys.path(pf), filepath.Join(dir, "physfn")))
		must(h.t, os.Symlink(dir, h.sys.path(pf, fmt.Sprintf("virtfn%d", i))))
		must(h.t, os.Symlink(dir, h.sys.path("bus/pci/devices", vf)))
	}
	return os.WriteFile(h.sys.path(pf, "sriov_numvfs"), []byte(text), 0o644)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (h *fakeHost) note(format string, args ...any) error {
	h.did = append(h.did, fmt.Sprintf(format, args...))
	return nil
}
func (h *fakeHost) isUp(string) (bool, error)         { return !h.down, nil }
func (h *fakeHost) setUp(name string) error           { return h.note("%s up", name) }
func (h *fakeHost) setMTU(name string, mtu int) error { return h.note("%s mtu %d", name, mtu) }
func (h *fakeHost) addAddress(name string, a netip.Prefix) error {
	return h.note("%s addr %v", name, a)
}

func want(n int) *Config { return &Config{VFs: []VFs{{"eth0", n}}} }

func (h *fakeHost) leftOver() []string {
	files, _ := filepath.Glob(filepath.Join(h.state, "*.json"))
	return files
}

func TestFunctionsAreMadeAndPutBack(t *testing.T) {
	h := newFakeHost(t)
	k := h.daemon()
	cfg := want(2)
	cfg.VFMTU, cfg.VFAddresses = 4200, []netip.Prefix{netip.MustParsePrefix("10.1.0.1/24")}
	must(t, k.take(cfg))
	if h.made() != 2 || !slices.Equal(k.functions(), []string{"0000:3b:00.1", "0000:3b:00.2"}) {
		t.Errorf("%d made, %v", h.made(), k.functions())
	}
	if got := strings.Join(h.did, ", "); got != "vf0 mtu 4200, vf0 up, vf0 addr 10.1.0.1/24, vf1 mtu 4200, vf1 up" {
		t.Error(got)
	}
	must(t, k.release())
	if h.made() != 0 || len(h.leftOver()) != 0 {
		t.Errorf("%d left, %v", h.made(), h.leftOver())
	}
	must(t, k.release()) // once more is nothing
}

func TestADeadDaemonsFunctionsArePutBack(t *testing.T) {
	h := newFakeHost(t)
	k := h.daemon()
	must(t, k.take(want(2)))
	h.kill(k)
	must(t, h.daemon().take(&Config{})) // that wants none
	if h.made() != 0 || len(h.leftOver()) != 0 {
		t.Errorf("%d left, %v", h.made(), h.leftOver())
	}
}

func TestADeadDaemonsFunctionsAreTakenOver(t *testing.T) {
	h := newFakeHost(t)
	k := h.daemon()
	must(t, k.take(want(2)))
	life := h.life
	h.kill(k)
	k = h.daemon()
	must(t, k.take(want(2)))
	if h.life != life || h.made() != 2 {
		t.Errorf("made %d times more, %d now", h.life-life, h.made())
	}
	h.kill(k)
	k = h.daemon()
	must(t, k.take(want(3))) // as many as that are not there
	if h.made() != 3 {
		t.Errorf("%d, want 3", h.made())
	}
	must(t, k.release())
	if h.made() != 0 {
		t.Errorf("%d left", h.made())
	}
}

// Nobody's functions but the daemon's are touched: neither those that were there before, nor those that somebody made after a
// daemon that died had its own taken away.
func TestOthersFunctionsAreLeftAlone(t *testing.T) {
	h := newFakeHost(t)
	must(t, h.write(h.sys.path("bus/pci/devices", pfAddress, "sriov_numvfs"), "2"))
	k := h.daemon()
	if err := k.take(want(2)); err == nil || !strings.Contains(err.Error(), "2 that somebody else made") {
		t.Error(err)
	}
	must(t, k.release())
	if h.made() != 2 {
		t.Fatalf("%d of somebody else's 2 are left", h.made())
	}
	must(t, h.write(h.sys.path("bus/pci/devices", pfAddress, "sriov_numvfs"), "0"))
	must(t, k.take(want(2)))
	h.kill(k)
	must(t, h.write(h.sys.path("bus/pci/devices", pfAddress, "sriov_numvfs"), "0"))
	must(t, h.write(h.sys.path("bus/pci/devices", pfAddress, "sriov_numvfs"), "2")) // as many, by somebody else
	must(t, h.daemon().take(&Config{}))
	if h.made() != 2 || len(h.leftOver()) != 0 {
		t.Errorf("%d of somebody else's 2 are left, %v", h.made(), h.leftOver())
	}
}

// A successor starts while its predecessor lives: the last of the two puts back.
func TestASuccessorSharesFunctions(t *testing.T) {
	h := newFakeHost(t)
	old, next := h.daemon(), h.daemon()
	must(t, old.take(want(2)))
	if err := next.take(want(3)); err == nil || !strings.Contains(err.Error(), "holds 2: ask for as many") {
		t.Error(err)
	}
	must(t, next.take(want(2)))
	must(t, old.release())
	if h.made() != 2 || len(next.functions()) != 2 {
		t.Fatalf("%d left to the successor", h.made())
	}
	must(t, next.release())
	if h.made() != 0 {
		t.Errorf("%d left", h.made())
	}
}

// A function whose port says that it is active carries nothing as long as its interface has no link.
func TestAFunctionCarriesWhenItsLinkIsUp(t *testing.T) {
	sys := tree(t, map[string]string{"class/infiniband/rxe0/ports/1/state": "4: ACTIVE", "class/infiniband/rxe0/parent": "vf0", "class/net/vf0/operstate": "down"})
	k := &keeper{sys: sys}
	devices := func(string, string) []string { return []string{"rxe0"} }
	if k.carriesOver("0000:3b:00.1", "vf0", devices) {
		t.Error("it carries without a link")
	}
	if r := k.remedy("vf0"); !strings.Contains(r, "no link") {
		t.Error(r)
	}
	must(t, os.WriteFile(sys.path("class/net/vf0/operstate"), []byte("up\n"), 0o644))
	if !k.carriesOver("0000:3b:00.1", "vf0", devices) {
		t.Error("it carries nothing")
	}
	if r := k.remedy("vf0"); !strings.Contains(r, "rdma link add rxe9 type rxe netdev vf0") {
		t.Error(r)
	}
}

func TestFunctionsThatCannotBeMade(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(h *fakeHost)
		cfg  *Config
		want string
	}{
		{"too many", nil, want(8), "it can have 7 (sriov_totalvfs)"},
		{"no such interface", nil, &Config{VFs: []VFs{{"eth7", 1}}}, "there is no such network interface"},
		{"no SR-IOV", nil, &Config{VFs: []VFs{{"0000:3c:00.0", 1}}}, "it has no SR-IOV: switch it on"},
		{"nothing that could", func(h *fakeHost) { os.RemoveAll(h.sys.path("class/infiniband")) }, &Config{VFs: []VFs{{"", 2}}}, "none of the RDMA devices"},
		{"link down", func(h *fakeHost) { h.down = true }, want(1), "ip link set eth0 up"},
		{"no rights", func(h *fakeHost) { h.fail = unix.EACCES }, want(1), "run the daemon as root"},
		{"read-only", func(h *fakeHost) { h.fail = unix.EROFS }, want(1), "run the daemon on the host or privileged"},
		{"no room", func(h *fakeHost) { h.fail = unix.ENOMEM }, want(1), "pci=realloc"},
		{"no room and no IOMMU", func(h *fakeHost) { h.fail = unix.ENOMEM; os.RemoveAll(h.sys.path("class/iommu")) }, want(1), "the IOMMU is off now"},
		{"busy", func(h *fakeHost) { h.fail = unix.EBUSY }, want(1), "try again"},
		{"too many addresses", nil, &Config{VFs: []VFs{{"eth0", 1}}, VFAddresses: make([]netip.Prefix, 2)}, "2 addresses for 1 virtual functions"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newFakeHost(t)
			if c.set != nil {
				c.set(h)
			}
			k := h.daemon()
			if err := k.take(c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if h.made() != 0 || len(k.held) != 0 || len(h.leftOver()) != 0 {
				t.Errorf("%d made, %d held, %v", h.made(), len(k.held), h.leftOver())
			}
		})
	}
}

// What could not be put back stays written down, for the next start.
func TestFunctionsThatCannotBePutBack(t *testing.T) {
	h := newFakeHost(t)
	k := h.daemon()
	must(t, k.take(want(1)))
	h.fail = unix.EBUSY
	if err := k.release(); !errors.Is(err, unix.EBUSY) {
		t.Error(err)
	}
	h.fail = nil
	must(t, h.daemon().take(&Config{}))
	if h.made() != 0 || len(h.leftOver()) != 0 {
		t.Errorf("%d left, %v", h.made(), h.leftOver())
	}
}

func TestEveryFunctionWithRDMA(t *testing.T) {
	h := newFakeHost(t)
	k := h.daemon()
	must(t, k.take(&Config{VFs: []VFs{{"", 2}, {"mlx5_0", 1}}})) // the one that is named has its own number
	if h.made() != 1 {
		t.Errorf("%d made", h.made())
	}
	must(t, k.release())
}

func TestParseVFs(t *testing.T) {
	list, err := ParseVFs([]string{"2", "eth0=4", "0000:3b:00.0=1"})
	if want := []VFs{{"", 2}, {"eth0", 4}, {"0000:3b:00.0", 1}}; err != nil || !slices.Equal(list, want) {
		t.Errorf("%v, %v", list, err)
	}
	for _, bad := range []string{"", "0", "-1", "eth0", "eth0=", "=2", "eth0=x", "a b=1", "70000", "../x=1"} {
		if list, err := ParseVFs([]string{bad}); err == nil {
			t.Errorf("%q is %v", bad, list)
		}
	}
	if _, err := ParseVFs([]string{"eth0=1", "eth0=2"}); err == nil {
		t.Error("eth0 twice")
	}
	if a, err := ParseAddresses([]string{"10.1.0.5/24", "fd00::1/64"}); err != nil || len(a) != 2 {
		t.Errorf("%v, %v", a, err)
	}
	for _, bad := range []string{"10.1.0.5", "10.1.0.5/0", "x/24", ""} {
		if a, err := ParseAddresses([]string{bad}); err == nil {
			t.Errorf("%q is %v", bad, a)
		}
	}
}

func FuzzParseVFs(f *testing.F) {
	f.Add("eth0=2")
	f.Add("4")
	f.Fuzz(func(t *testing.T, word string) {
		list, err := ParseVFs([]string{word})
		if err != nil {
			return
		}
		if len(list) != 1 || list[0].Count < 1 || list[0].Count > vfsMax || strings.Contains(list[0].PF, "/") {
			t.Errorf("%q is %+v", word, list)
		}
	})
}

// The physical function's port gives way to the virtual ones that were made of it, also where it is named: they are meant.
func TestMadeFunctionsAreUsedInTheirPFsPlace(t *testing.T) {
	for _, c := range []struct {
		devices, used []string
	}{
		{nil, []string{"mlx5_1", "mlx5_2", "mlx5_3"}}, // mlx5_3 is somebody else's virtual function
		{[]string{"eth0"}, []string{"mlx5_1", "mlx5_2"}},
		{[]string{"mlx5_2"}, []string{"mlx5_2"}},
		{[]string{"mlx5_3"}, []string{"mlx5_3"}},
	} {
		cfg := &Config{Devices: c.devices, taken: []string{"0000:3b:00.1", "0000:3b:00.2"}}
		ports := []*port{
			{device: "mlx5_0", netdev: "eth0", at: place{pci: pfAddress}, sriov: functions{index: -1}},
			{device: "mlx5_1", at: place{pci: "0000:3b:00.1"}, sriov: functions{pf: pfAddress}, parent: []string{pfAddress, "eth0"}},
			{device: "mlx5_2", at: place{pci: "0000:3b:00.2"}, sriov: functions{pf: pfAddress, index: 1}, parent: []string{pfAddress, "eth0"}},
			{device: "mlx5_3", at: place{pci: "0000:4b:00.2"}, sriov: functions{pf: "0000:4b:00.0", index: 1}},
		}
		for _, p := range ports {
			p.number = 1
			p.ask(roce(cgo.PortActive), cfg, sysfs(t.TempDir()))
		}
		choose(ports, cfg)
		var used []string
		for _, p := range ports {
			if p.used {
				used = append(used, p.device)
			}
			if p.used && p.parent != nil != strings.Contains(p.reason, "that this daemon made") {
				t.Errorf("%s: %q", p.device, p.reason)
			}
		}
		if !slices.Equal(used, c.used) {
			t.Errorf("%v: %v, want %v", c.devices, used, c.used)
		}
		if c.devices == nil && !strings.Contains(ports[0].reason, "used in its place") {
			t.Error(ports[0].reason)
		}
	}
}
