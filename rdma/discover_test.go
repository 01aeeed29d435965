package rdma

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/cgo"
)

func at(n int) *int { return &n }

func gidOf(index int, kind cgo.GIDType, addr ...byte) cgo.GID {
	g := cgo.GID{Index: uint32(index), Type: kind}
	copy(g.Addr[:], addr)
	return g
}

var (
	ipv4     = []byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}
	local    = []byte{0xfe, 0x80, 15: 1}
	routable = []byte{0xfd, 15: 1}
)

func TestChooseGID(t *testing.T) {
	for _, c := range []struct {
		name  string
		layer cgo.LinkLayer
		index *int
		table []cgo.GID
		want  int // -1: none
		how   string
	}{
		{"IPv4 first", cgo.Ethernet, nil, []cgo.GID{gidOf(0, cgo.GIDRoCEv1, local...), gidOf(1, cgo.GIDRoCEv2, local...), gidOf(2, cgo.GIDRoCEv1, ipv4...), gidOf(3, cgo.GIDRoCEv2, ipv4...)}, 3, "IPv4"},
		{"routable before link-local", cgo.Ethernet, nil, []cgo.GID{gidOf(1, cgo.GIDRoCEv2, local...), gidOf(5, cgo.GIDRoCEv2, routable...)}, 5, "routable"},
		{"link-local if that is all", cgo.Ethernet, nil, []cgo.GID{gidOf(0, cgo.GIDRoCEv1, local...), gidOf(1, cgo.GIDRoCEv2, local...)}, 1, "link-local"},
		{"v1 alone", cgo.Ethernet, nil, []cgo.GID{gidOf(0, cgo.GIDRoCEv1, ipv4...)}, -1, ""},
		{"the one asked for", cgo.Ethernet, at(2), []cgo.GID{gidOf(2, cgo.GIDRoCEv1, ipv4...), gidOf(3, cgo.GIDRoCEv2, ipv4...)}, 2, "set"},
		{"index 0 asked for", cgo.Ethernet, at(0), []cgo.GID{gidOf(0, cgo.GIDRoCEv2, local...), gidOf(3, cgo.GIDRoCEv2, ipv4...)}, 0, "set"},
		{"asked for in vain", cgo.Ethernet, at(9), []cgo.GID{gidOf(3, cgo.GIDRoCEv2, ipv4...)}, -1, ""},
		{"InfiniBand", cgo.InfiniBand, nil, []cgo.GID{gidOf(0, cgo.GIDInfiniBand, local...), gidOf(1, cgo.GIDInfiniBand, local...)}, 0, "first"},
		{"InfiniBand, asked for", cgo.InfiniBand, at(1), []cgo.GID{gidOf(0, cgo.GIDInfiniBand, local...), gidOf(1, cgo.GIDInfiniBand, local...)}, 1, "set"},
		{"nothing", cgo.InfiniBand, nil, nil, -1, ""},
	} {
		g, how, err := chooseGID(c.table, c.layer, c.index)
		if (err == nil) != (c.want >= 0) || err == nil && (int(g.Index) != c.want || how != c.how) {
			t.Errorf("%s: %+v, %q, %v", c.name, g, how, err)
		}
	}
}

// madeUp is a device that a test makes up.
type madeUp struct {
	state cgo.PortAttr
	gids  []cgo.GID
	pkeys []uint16
	err   error
}

func (m *madeUp) Attr() (cgo.DeviceAttr, error)   { return cgo.DeviceAttr{Ports: 1}, m.err }
func (m *madeUp) Port(int) (cgo.PortAttr, error)  { return m.state, m.err }
func (m *madeUp) GIDTable(int) ([]cgo.GID, error) { return m.gids, nil }
func (m *madeUp) PKey(_, index int) (uint16, error) {
	if index >= len(m.pkeys) {
		return 0, syscall.EINVAL
	}
	return m.pkeys[index], nil
}

func roce(state cgo.PortState) *madeUp {
	return &madeUp{state: cgo.PortAttr{State: state, LinkLayer: cgo.Ethernet, PKeys: 1}, gids: []cgo.GID{gidOf(3, cgo.GIDRoCEv2, ipv4...)}, pkeys: []uint16{0xffff}}
}

func infiniband(state cgo.PortState) *madeUp {
	return &madeUp{state: cgo.PortAttr{State: state, LinkLayer: cgo.InfiniBand, LID: 7, PKeys: 5}, gids: []cgo.GID{gidOf(0, cgo.GIDInfiniBand, local...)},
		pkeys: []uint16{0xffff, 0, 0x0123, 0x8123, 0x7777}}
}

// roceOn is active with an address of an interface.
func roceOn(index uint32) *madeUp {
	m := roce(cgo.PortActive)
	m.gids[0].IfIndex = index
	return m
}

func TestPortIsUsedOrSaysWhyNot(t *testing.T) {
	sys := tree(t, map[string]string{
		"class/net/eth9/ifindex": "8", "class/net/eth9/operstate": "up",
		"class/net/vlan7/ifindex": "7", "class/net/vlan7/operstate": "lowerlayerdown",
	})
	for _, c := range []struct {
		name string
		dev  *madeUp
		cfg  Config
		want string // "" used, else what the reason says
		gid  int
		pkey pkey
	}{
		{name: "RoCE", dev: roce(cgo.PortActive), gid: 3, pkey: pkey{0, 0xffff}},
		{name: "RoCE down", dev: roce(cgo.PortDown), want: "ip link set eth9 up"},
		{name: "RoCE without an address", dev: &madeUp{state: cgo.PortAttr{State: cgo.PortActive, LinkLayer: cgo.Ethernet}}, want: "give its network interface an IP address"},
		{name: "GID in vain", dev: roce(cgo.PortActive), cfg: Config{GIDIndex: at(0)}, want: "there are: 3 (RoCE v2 10.0.0.1)"},
		{name: "InfiniBand", dev: infiniband(cgo.PortActive), pkey: pkey{0, 0xffff}},
		{name: "InfiniBand without a subnet manager", dev: infiniband(cgo.PortInit), want: "subnet manager"},
		{name: "P_Key by index", dev: infiniband(cgo.PortActive), cfg: Config{PKeyIndex: 4}, pkey: pkey{4, 0x7777}},
		{name: "P_Key by an index that is empty", dev: infiniband(cgo.PortActive), cfg: Config{PKeyIndex: 1}, want: "P_Key 1 is empty"},
		{name: "P_Key beyond the table", dev: infiniband(cgo.PortActive), cfg: Config{PKeyIndex: 5}, want: "the table has 5 entries"},
		{name: "P_Key by value, the full member", dev: infiniband(cgo.PortActive), cfg: Config{PKey: 0x0123}, pkey: pkey{3, 0x8123}},
		{name: "P_Key by value of a limited member", dev: infiniband(cgo.PortActive), cfg: Config{PKey: 0xf777}, pkey: pkey{4, 0x7777}},
		{name: "P_Key that is not there", dev: infiniband(cgo.PortActive), cfg: Config{PKey: 0x8555}, want: "there are: 0xffff, 0x0123, 0x8123, 0x7777"},
		{name: "another device", dev: roce(cgo.PortActive), cfg: Config{Devices: []string{"mlx5_8"}}, want: "not among the devices to be used (mlx5_8)"},
		{name: "named by its device", dev: roce(cgo.PortActive), cfg: Config{Devices: []string{"mlx5_9"}}, gid: 3, pkey: pkey{0, 0xffff}},
		{name: "named by its interface", dev: roce(cgo.PortActive), cfg: Config{Devices: []string{"eth9"}}, gid: 3, pkey: pkey{0, 0xffff}},
		{name: "named by its function", dev: roce(cgo.PortActive), cfg: Config{Devices: []string{"0000:09:00.0"}}, gid: 3, pkey: pkey{0, 0xffff}},
		{name: "its other port named", dev: roce(cgo.PortActive), cfg: Config{Devices: []string{"mlx5_9:1"}}, want: "not among"},
		{name: "broken", dev: &madeUp{err: errors.New("firmware is gone")}, want: "firmware is gone"},
		{name: "RoCE without a link", dev: roceOn(7), want: "vlan7 has no link yet"},
		{name: "RoCE with a link", dev: roceOn(8), gid: 3, pkey: pkey{0, 0xffff}},
	} {
		p := &port{device: "mlx5_9", number: 2, netdev: "eth9", at: place{pci: "0000:09:00.0"}}
		p.ask(c.dev, &c.cfg, sys)
		switch {
		case p.used != (c.want == ""), !strings.Contains(p.reason, c.want):
			t.Errorf("%s: used %v, %q", c.name, p.used, p.reason)
		case p.used && (int(p.gid.Index) != c.gid || p.pkey != c.pkey):
			t.Errorf("%s: GID %d, P_Key %+v", c.name, p.gid.Index, p.pkey)
		}
	}
}

// Every port that is found is told of, and those that were asked for and are not there.
func TestNothingIsLeftOut(t *testing.T) {
	d := &discovery{ports: []*port{{device: "mlx5_0", number: 1, netdev: "eth0", used: true}}}
	d.unlisted([]string{"mlx5_0"}, &Config{Devices: []string{"eth0", "mlx5_7"}}, []string{"mlx5_0", "efa_0"})
	var got []string
	for _, p := range d.ports {
		got = append(got, p.name())
	}
	if want := []string{"mlx5_0", "efa_0", "mlx5_7"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	why := d.why().Error()
	for _, want := range []string{"efa_0: libibverbs has no driver for it", "mlx5_7: there is no such device", "there are: mlx5_0"} {
		if !strings.Contains(why, want) {
			t.Errorf("%q does not say %q", why, want)
		}
	}
}

func TestSettingsThatCannotBeMeant(t *testing.T) {
	for want, c := range map[string]Config{
		"GID index -1": {GIDIndex: at(-1)}, "P_Key index -2": {PKeyIndex: -2}, "use one of them": {PKey: 0x8001, PKeyIndex: 3}, "no partition": {PKey: 0x8000},
		"service level 16": {ServiceLevel: 16}, "traffic class 256": {TrafficClass: 256}, "acknowledgement timeout 32: use 1 to 31": {AckTimeout: 32}, "spinning for -1ns": {Spin: -1}, "spinning for 2s": {Spin: 2 * time.Second},
		"device \"a b\"": {Devices: []string{"a b"}}, "device \"\"": {Devices: []string{""}},
	} {
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	good := Config{AckTimeout: 31, GIDIndex: at(0), PKey: 0x8001, ServiceLevel: 15, TrafficClass: 255, Spin: time.Millisecond, Devices: []string{"mlx5_0:2"}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
}

func TestSlowByFarIsLeftOut(t *testing.T) {
	ports := func() []*port {
		return []*port{
			{device: "mlx5_0", used: true, rate: 400_000, choice: "IPv4"}, {device: "mlx5_1", used: true, rate: 200_000, choice: "IPv4"}, {device: "mlx5_2", used: true, rate: 100_000, choice: "IPv4"},
			{device: "rxe0", used: true, choice: "IPv4"}, {device: "mlx5_3", rate: 1_000_000, reason: "it is down"},
		}
	}
	for _, c := range []struct {
		cfg  Config
		used []string
	}{
		{Config{}, []string{"mlx5_0", "mlx5_1", "rxe0"}},
		{Config{Devices: []string{"mlx5_0", "mlx5_2"}}, []string{"mlx5_0", "mlx5_1", "mlx5_2", "rxe0"}},
	} {
		list := ports()
		choose(list, &c.cfg)
		var used []string
		for _, p := range list {
			if p.used {
				used = append(used, p.device)
			}
		}
		if !slices.Equal(used, c.used) {
			t.Errorf("%v: %v, want %v", c.cfg.Devices, used, c.used)
		}
		if len(c.cfg.Devices) == 0 && list[2].reason != "its 100 Gb/s are slower by far than the 400 Gb/s of mlx5_0: name both with --rdma-devices to have it used" {
			t.Error(list[2].reason)
		}
		if list[4].reason != "it is down" {
			t.Error(list[4].reason)
		}
	}
}

func TestPortsAreBounded(t *testing.T) {
	var ports []*port
	for i := range railsMax + 3 {
		ports = append(ports, &port{device: "mlx5", used: i%2 == 0, waits: i%2 == 1})
	}
	ports = append(ports, &port{device: "off", reason: "it is off"})
	choose(ports, &Config{})
	n := 0
	for _, p := range ports {
		if p.used || p.waits {
			n++
		}
	}
	if last := ports[railsMax+2]; n != railsMax || !strings.Contains(last.reason, "name those that you want") || ports[railsMax+3].reason != "it is off" {
		t.Errorf("%d are used, %q, %q", n, last.reason, ports[railsMax+3].reason)
	}
}

// tree makes files and links (values that begin with "->") below a folder.
func tree(t *testing.T, files map[string]string) sysfs {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if to, link := strings.CutPrefix(content, "->"); link {
			err = os.Symlink(filepath.Join(root, to), name)
		} else {
			err = os.WriteFile(name, []byte(content+"\n"), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return sysfs(root)
}

const (
	pf = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
	vf = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.2"
)

func host(t *testing.T) sysfs {
	return tree(t, map[string]string{
		pf + "/numa_node": "1", pf + "/sriov_totalvfs": "8", pf + "/sriov_numvfs": "2", pf + "/net/eth0/ifindex": "3", pf + "/virtfn10": "->" + vf, pf + "/virtfn2": "->devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1",
		"devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/numa_node": "1",
		vf + "/numa_node": "1", vf + "/physfn": "->" + pf, vf + "/virtio1/net/eth1/ifindex": "4",
		"bus/pci/devices/0000:3b:00.0": "->" + pf, "bus/pci/devices/0000:3b:00.2": "->" + vf,
		"class/infiniband/mlx5_0/device": "->" + pf, "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE", "class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0": "eth0",
		"class/infiniband/rxe0/parent": "eth1", "class/infiniband/rxe0/ports/1/state": "1: DOWN",
		"class/net/eth0/ifindex": "3", "class/net/eth0/device": "->" + pf, "class/net/eth1/ifindex": "4", "class/net/eth1/device": "->" + vf + "/virtio1",
	})
}

func TestPlaces(t *testing.T) {
	sys := host(t)
	p := sys.placeOf(sys.path("class/infiniband/mlx5_0"))
	if p.pci != "0000:3b:00.0" || p.numa != 1 || strings.Join(p.path, " ") != "pci0000:3a 0000:3a:00.0 0000:3b:00.0" {
		t.Errorf("%+v", p)
	}
	if p := sys.placeOf(sys.path("class/net/eth1")); p.pci != "0000:3b:00.2" { // a virtio interface belongs to its function
		t.Errorf("%+v", p)
	}
	if p := sys.placeOf(sys.path("class/infiniband/rxe0")); p.pci != "" || p.numa != -1 {
		t.Errorf("%+v", p)
	}
	for _, odd := range []string{"", "../../../class/net/eth0/device", "0000:3b:00.9", "0000:3B:00.0"} {
		if p := sys.function(odd); p.pci != "" {
			t.Errorf("%q is at %+v", odd, p)
		}
	}
	if n := sys.netdev(4); n != "eth1" {
		t.Errorf("interface 4 is %q", n)
	}
	if a, b := sys.netdevOfPort("mlx5_0", 1), sys.netdevOfPort("rxe0", 1); a != "eth0" || b != "eth1" {
		t.Errorf("%q, %q", a, b)
	}
	if s := sys.portState("mlx5_0", 1); s != "ACTIVE" {
		t.Errorf("state %q", s)
	}
}

func TestFunctions(t *testing.T) {
	sys := host(t)
	if f := sys.functionsOf("0000:3b:00.0"); f != (functions{index: -1, made: 2, max: 8}) || f.String() != "2 of 8 virtual functions" {
		t.Errorf("%+v: %v", f, f)
	}
	if f := sys.functionsOf("0000:3b:00.2"); f.pf != "0000:3b:00.0" || f.index != 1 || f.String() != "virtual function 1 of 0000:3b:00.0" {
		t.Errorf("%+v: %v", f, f)
	}
	if f := sys.functionsOf(""); f != (functions{index: -1}) || f.String() != "" {
		t.Errorf("%+v: %v", f, f)
	}
}

func TestHasLink(t *testing.T) {
	sys := tree(t, map[string]string{"class/net/eth0/operstate": "up", "class/net/eth1/operstate": "down", "class/net/d0/operstate": "unknown"})
	for name, want := range map[string]bool{"eth0": true, "eth1": false, "d0": true, "ib0": true} {
		if got := sys.hasLink(name); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

func TestStatusOfAPort(t *testing.T) {
	sys := host(t)
	p := &port{device: "mlx5_0", number: 1, netdev: "eth0", at: sys.function("0000:3b:00.0"), sriov: sys.functionsOf("0000:3b:00.0")}
	dev := roce(cgo.PortDown)
	p.ask(dev, &Config{}, sys)
	s := p.status(sys)
	if s.Used || s.State != "active" || !strings.Contains(s.Reason, "came up after") || s.NUMANode != 1 || s.VFsMax != 8 || s.VirtualFunction != -1 {
		t.Errorf("%+v", s)
	}
	dev.state.State = cgo.PortActive
	p.ask(dev, &Config{}, sys)
	choose([]*port{p}, &Config{})
	if s = p.status(sys); !s.Used || s.GID != "10.0.0.1" || s.GIDIndex != 3 || s.GIDType != "RoCE v2" || s.PKey != "0xffff" || s.Reason != "IPv4 address 10.0.0.1" {
		t.Errorf("%+v", s)
	}
}

func TestRoute(t *testing.T) {
	own := func(layer cgo.LinkLayer, gid cgo.GID) *standing {
		return &standing{state: cgo.PortAttr{LinkLayer: layer, LID: 3}, gid: gid}
	}
	foreign := []byte{0xfe, 0xc0, 7: 9, 15: 2}
	for _, c := range []struct {
		name string
		own  *standing
		peer hello
		cfg  Config
		want cgo.QPAttr
	}{
		{"RoCE", own(cgo.Ethernet, gidOf(3, cgo.GIDRoCEv2, ipv4...)), hello{gid: gidOf(0, 0, ipv4...).Addr}, Config{ServiceLevel: 5, TrafficClass: 104},
			cgo.QPAttr{IsGlobal: 1, DGID: gidOf(0, 0, ipv4...).Addr, SGIDIndex: 3, HopLimit: hopLimit, TrafficClass: 104, ServiceLevel: 5}},
		{"RoCE, GID 0", own(cgo.Ethernet, gidOf(0, cgo.GIDRoCEv2, local...)), hello{gid: gidOf(0, 0, local...).Addr}, Config{},
			cgo.QPAttr{IsGlobal: 1, DGID: gidOf(0, 0, local...).Addr, HopLimit: hopLimit}},
		{"InfiniBand by LID alone", own(cgo.InfiniBand, gidOf(1, cgo.GIDInfiniBand, local...)), hello{lid: 7, gid: gidOf(0, 0, local...).Addr}, Config{ServiceLevel: 2},
			cgo.QPAttr{DLID: 7, ServiceLevel: 2}},
		{"InfiniBand with a traffic class", own(cgo.InfiniBand, gidOf(1, cgo.GIDInfiniBand, local...)), hello{lid: 7, gid: gidOf(0, 0, local...).Addr}, Config{TrafficClass: 8},
			cgo.QPAttr{DLID: 7, IsGlobal: 1, DGID: gidOf(0, 0, local...).Addr, SGIDIndex: 1, HopLimit: hopLimit, TrafficClass: 8}},
		{"InfiniBand in another subnet", own(cgo.InfiniBand, gidOf(1, cgo.GIDInfiniBand, local...)), hello{lid: 7, gid: gidOf(0, 0, foreign...).Addr}, Config{},
			cgo.QPAttr{DLID: 7, IsGlobal: 1, DGID: gidOf(0, 0, foreign...).Addr, SGIDIndex: 1, HopLimit: hopLimit}},
		{"InfiniBand without LIDs", own(cgo.InfiniBand, gidOf(0, cgo.GIDInfiniBand, local...)), hello{gid: gidOf(0, 0, local...).Addr}, Config{},
			cgo.QPAttr{IsGlobal: 1, DGID: gidOf(0, 0, local...).Addr, HopLimit: hopLimit}},
	} {
		var a cgo.QPAttr
		if route(&a, c.own, &c.peer, &c.cfg); a != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, a, c.want)
		}
	}
}
