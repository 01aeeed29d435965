package rdma

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/Mellanox/rdmamap"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// port is a port of a device as it was found, whether or not it carries traffic.
type port struct {
	device string
	number int
	netdev string // of a RoCE port
	at     place
	sriov  functions
	parent []string // names of the physical function, where this daemon made the port's virtual one of it
	state  cgo.PortAttr
	rate   uint64 // Mb/s, 0 where the device does not say
	gid    cgo.GID
	pkey   pkey
	used   bool
	waits  bool   // it is not used now, and may be later: it is down, or has no address yet
	reason string // why, or why not
	// followed says that a rail keeps its state up to date; what is not followed is as it was at the start.
	followed bool
	choice   string // how its address and P_Key were chosen
}

// pkey is an entry of a port's table of partition keys.
type pkey struct {
	index int
	value uint16
}

// asker is what a port is asked by: a device, or a test's.
type asker interface {
	Attr() (cgo.DeviceAttr, error)
	Port(port int) (cgo.PortAttr, error)
	PKey(port, index int) (uint16, error)
	GIDTable(port int) ([]cgo.GID, error)
}

// discovery is what was found on this host.
type discovery struct {
	ports []*port // all
	rails []*rail // those that are used, or may be later
}

// discover looks at every port of every device, and opens those that can be used, now or when they have come up. Where there
// are none, it says why beside what it found.
func discover(cfg *Config, sys sysfs) (*discovery, error) {
	v := cgo.Probe()
	if err := v.Err(); err != nil {
		return &discovery{}, fmt.Errorf("%w; %s", err, v.Remedy())
	}
	d := &discovery{}
	opened := make(map[*port]*rail)
	for _, name := range v.Devices {
		for number, ports := 1, 1; number <= ports; number++ {
			r := &rail{name: name, port: number, soft: isSoft(name)}
			p, n := r.open(cfg, sys)
			ports = max(ports, n)
			d.ports = append(d.ports, p)
			opened[p] = r
		}
	}
	d.unlisted(v.Devices, cfg, rdmamap.GetRdmaDeviceList())
	choose(d.ports, cfg)
	var errs []error
	for _, p := range d.ports {
		r := opened[p]
		if r == nil {
			continue
		}
		if p.used || p.waits {
			if err := r.prepare(); err != nil {
				p.unfit(err)
			}
		}
		if !p.used && !p.waits {
			errs = append(errs, r.close())
			continue
		}
		r.look(cfg)
		r.index = len(d.rails)
		d.rails = append(d.rails, r)
	}
	if len(d.rails) == 0 {
		errs = append(errs, d.why())
	}
	err := errors.Join(errs...)
	if err != nil {
		err = errors.Join(err, closeAll(d.rails))
		d.rails = nil
	}
	return d, err
}

func closeAll(rails []*rail) error {
	var errs []error
	for _, r := range rails {
		errs = append(errs, r.close())
	}
	return errors.Join(errs...)
}

// unlisted adds what the kernel or the settings know and libibverbs does not.
func (d *discovery) unlisted(listed []string, cfg *Config, kernel []string) {
	slices.Sort(kernel)
	for _, name := range kernel {
		if !slices.Contains(listed, name) {
			d.ports = append(d.ports, &port{device: name, number: 1, at: nowhere, sriov: functions{index: -1},
				reason: "libibverbs has no driver for it: apt-get install ibverbs-providers"})
		}
	}
	for _, want := range cfg.Devices {
		if !slices.ContainsFunc(d.ports, func(p *port) bool { return p.named(want) }) {
			d.ports = append(d.ports, &port{device: want, number: 1, at: nowhere, sriov: functions{index: -1},
				reason: "there is no such device, port or network interface here; there are: " + strings.Join(listed, ", ")})
		}
	}
}

// why says why no port can be used.
func (d *discovery) why() error {
	var whys []string
	for _, p := range d.ports {
		whys = append(whys, p.name()+": "+p.reason)
	}
	return errors.New("no RDMA port can be used: " + strings.Join(whys, "; "))
}

// open opens a port's device and describes the port. ports is how many the device has.
func (r *rail) open(cfg *Config, sys sysfs) (_ *port, ports int) {
	p := &port{device: r.name, number: r.port, at: nowhere, sriov: functions{index: -1}}
	dev, err := cgo.Open(r.name)
	if err != nil {
		p.reason = err.Error()
		return p, 1
	}
	r.dev = dev
	p.netdev = sys.netdevOfPort(r.name, r.port)
	p.at = sys.placeOf(sys.path("class/infiniband", r.name))
	if p.at.pci == "" && p.netdev != "" { // soft RoCE: where its network interface is
		p.at = sys.placeOf(sys.path("class/net", p.netdev))
	}
	p.sriov = sys.functionsOf(p.at.pci)
	if p.taken(cfg) {
		p.parent = sys.namesOf(p.sriov.pf)
	}
	if r.attr, err = dev.Attr(); err != nil {
		p.reason = err.Error()
		return p, 1
	}
	p.ask(dev, cfg, sys)
	r.found, r.netdev, r.numa = p, p.netdev, p.at.numa
	return p, int(r.attr.Ports)
}

// prepare makes what a rail needs beyond its device.
func (r *rail) prepare() (err error) {
	r.pd, err = r.dev.NewPD()
	return err
}

func (p *port) unfit(err error) { p.used, p.waits, p.reason = false, false, err.Error() }

// ask finds out whether the port can be used, and with which address and P_Key.
func (p *port) ask(dev asker, cfg *Config, sys sysfs) {
	var err error
	p.used, p.waits = false, false
	if p.state, err = dev.Port(p.number); err != nil {
		p.unfit(err)
		return
	}
	p.rate = p.state.RateMbps()
	if len(cfg.Devices) > 0 && !slices.ContainsFunc(cfg.Devices, p.named) {
		p.reason = "it is not among the devices to be used (" + strings.Join(cfg.Devices, ", ") + ")"
		return
	}
	if p.state.State != cgo.PortActive {
		p.waits, p.reason = true, p.inactive()
		return
	}
	table, err := dev.GIDTable(p.number)
	if err != nil {
		p.unfit(err)
		return
	}
	if p.gid, p.choice, err = chooseGID(table, p.state.LinkLayer, cfg.GIDIndex); err != nil {
		p.waits, p.reason = true, err.Error()
		return
	}
	if p.pkey, err = choosePKey(dev, p.number, int(p.state.PKeys), cfg); err != nil {
		p.unfit(err)
		return
	}
	if n := sys.netdevAt(p.netdev, p.gid.IfIndex); n != "" {
		p.netdev = n // that of the chosen address, as of a VLAN
	}
	if p.state.LinkLayer == cgo.Ethernet && !sys.hasLink(p.netdev) {
		p.waits, p.reason = true, fmt.Sprintf("it is active, but its network interface %s has no link yet: if that stays so, check the cable", p.netdev)
		return
	}
	p.used = true
}

// taken says whether the port is of a virtual function that this daemon made.
func (p *port) taken(cfg *Config) bool { return p.at.pci != "" && slices.Contains(cfg.taken, p.at.pci) }

// replaced says whether this daemon made virtual functions of the port's.
func (p *port) replaced(ports []*port, cfg *Config) bool {
	return p.at.pci != "" && slices.ContainsFunc(ports, func(v *port) bool { return v.used && v.sriov.pf == p.at.pci && v.taken(cfg) })
}

// inactive says what is wrong with a port that carries no traffic.
func (p *port) inactive() string {
	switch {
	case p.state.LinkLayer == cgo.InfiniBand && (p.state.State == cgo.PortInit || p.state.State == cgo.PortArmed):
		return fmt.Sprintf("it is %v, need it active: is a subnet manager running (sminfo)?", p.state.State)
	case p.netdev != "":
		return fmt.Sprintf("it is %v, need it active: check the cable, and ip link set %s up", p.state.State, p.netdev)
	}
	return fmt.Sprintf("it is %v, need it active: check the cable", p.state.State)
}

// name is how people name the port: mlx5_0, and mlx5_0:2 for all but the first.
func (p *port) name() string {
	if p.number > 1 {
		return p.device + ":" + strconv.Itoa(p.number)
	}
	return p.device
}

// named says whether a setting's word means this port: its device, device:port, network interface or PCI function. What
// names a physical function means the virtual ones that this daemon made of it, too.
func (p *port) named(word string) bool {
	return word == p.device || word == p.device+":"+strconv.Itoa(p.number) || word != "" && (word == p.netdev || word == p.at.pci) || slices.Contains(p.parent, word)
}

// chooseGID takes the entry with that index if one is given; else on InfiniBand the first, on Ethernet one of RoCE v2: for
// an IPv4 address, else for a routable IPv6 address, else any. how says which of these it was.
func chooseGID(table []cgo.GID, layer cgo.LinkLayer, index *int) (best cgo.GID, how string, err error) {
	rank := cgo.ReachNone
	hows := [...]string{cgo.ReachLink: "link-local", cgo.ReachIPv6: "routable", cgo.ReachIPv4: "IPv4"}
	for _, g := range table {
		if index != nil && int(g.Index) != *index {
			continue
		}
		score := g.Reach()
		if index != nil || layer == cgo.InfiniBand {
			score = cgo.ReachLink // all are alike
		}
		if score > rank {
			best, rank = g, score
		}
	}
	switch {
	case rank > 0 && index != nil:
		return best, "set", nil
	case rank > 0 && layer == cgo.InfiniBand:
		return best, "first", nil
	case rank > 0:
		return best, hows[rank], nil
	case index != nil:
		return best, "", fmt.Errorf("there is no GID %d; there are: %s", *index, indices(table))
	case layer == cgo.InfiniBand:
		return best, "", errors.New("it has no GID: is the subnet manager running (sminfo)?")
	}
	return best, "", errors.New("it has no RoCE v2 address: give its network interface an IP address (ip addr add ...)")
}

func indices(table []cgo.GID) string {
	var words []string
	for _, g := range table {
		words = append(words, fmt.Sprintf("%d (%v %s)", g.Index, g.Type, address(g.Addr)))
	}
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, ", ")
}

// address prints a GID as people write it: an IPv4 address where it is one.
func address(gid [16]byte) string { return netip.AddrFrom16(gid).Unmap().String() }

// pkeyMember is the bit of a partition key that makes its holder a full member: limited members reach full ones only.
const pkeyMember = 0x8000

// choosePKey gives the entry of the port's table that the settings ask for, by index or by value.
func choosePKey(dev asker, number, entries int, cfg *Config) (pkey, error) {
	if cfg.PKey == 0 {
		v, err := dev.PKey(number, cfg.PKeyIndex)
		if err != nil {
			return pkey{}, fmt.Errorf("%w: the table has %d entries", err, entries)
		}
		if v&^pkeyMember == 0 {
			return pkey{}, fmt.Errorf("its P_Key %d is empty: choose another with --rdma-pkey-index or --rdma-pkey", cfg.PKeyIndex)
		}
		return pkey{cfg.PKeyIndex, v}, nil
	}
	best := pkey{index: -1}
	var there []string
	for i := range entries {
		v, err := dev.PKey(number, i)
		if err != nil {
			return pkey{}, err
		}
		if v&^pkeyMember == 0 {
			continue
		}
		there = append(there, fmt.Sprintf("%#04x", v))
		if v&^pkeyMember == cfg.PKey&^pkeyMember && (best.index < 0 || v&pkeyMember > best.value&pkeyMember) {
			best = pkey{i, v}
		}
	}
	if best.index < 0 {
		return pkey{}, fmt.Errorf("P_Key %#04x is not in its table; there are: %s", cfg.PKey, strings.Join(there, ", "))
	}
	return best, nil
}

// slowerByFar is how many times the fastest port's rate must be another's for that one not to be used: a piece on it would
// hold its lease up longer than the others gain by it.
const slowerByFar = 4

// choose looks at the usable ports together: it takes those out that would only be in the way, and gives all a reason. What
// was asked for by name is used.
func choose(ports []*port, cfg *Config) {
	var fastest *port
	for _, p := range ports {
		if (p.used || p.waits) && p.replaced(ports, cfg) {
			p.used, p.waits, p.reason = false, false, "the virtual functions that this daemon made of it are used in its place"
		}
	}
	for _, p := range ports {
		if p.used && (fastest == nil || p.rate > fastest.rate) {
			fastest = p
		}
	}
	for _, p := range ports {
		if !p.used {
			continue
		}
		if len(cfg.Devices) == 0 && p.rate > 0 && p.rate*slowerByFar <= fastest.rate {
			p.used = false
			p.reason = fmt.Sprintf("its %s are slower by far than the %s of %s: name both with --rdma-devices to have it used", gbps(p.rate), gbps(fastest.rate), fastest.name())
			continue
		}
		p.reason = p.chosen()
	}
	bound(ports)
}

// bound keeps the ports to as many as the ends of a channel can tell each other of.
func bound(ports []*port) {
	n := 0
	for _, p := range ports {
		if p.used || p.waits {
			n++
		}
		if n > railsMax && (p.used || p.waits) {
			p.used, p.waits, p.reason = false, false, fmt.Sprintf("%d ports are used before it, which is the most: name those that you want with --rdma-devices", railsMax)
		}
	}
}

// chosen says what a port that is used is used with.
func (p *port) chosen() string {
	s := fmt.Sprintf("%s address %s", p.choice, address(p.gid.Addr))
	if p.parent != nil {
		s += ", on a virtual function that this daemon made"
	}
	return s
}

func gbps(mbps uint64) string { return fmt.Sprintf("%g Gb/s", float64(mbps)/1e3) }

// status is the port as status shows it.
func (p *port) status(sys sysfs) transfer.PortStatus {
	s := transfer.PortStatus{
		Device: p.device, Port: p.number, Netdev: p.netdev, PCI: p.at.pci, NUMANode: p.at.numa, RateMbps: p.rate, MTU: p.state.ActiveMTU, LID: p.state.LID,
		PhysicalFunction: p.sriov.pf, VirtualFunction: p.sriov.index, VFs: p.sriov.made, VFsMax: p.sriov.max, Used: p.used, Reason: p.reason,
	}
	if p.state.LinkLayer != 0 {
		s.LinkLayer, s.State = p.state.LinkLayer.String(), p.state.State.String()
	}
	if p.gid.Addr != [16]byte{} {
		s.GID, s.GIDIndex, s.GIDType = address(p.gid.Addr), int(p.gid.Index), p.gid.Type.String()
		s.PKeyIndex, s.PKey = p.pkey.index, fmt.Sprintf("%#04x", p.pkey.value)
	}
	if now := sys.portState(p.device, p.number); now != "" && !p.followed {
		s.State = strings.ToLower(now)
		if !p.used && p.state.State != 0 && p.state.State != cgo.PortActive && s.State == cgo.PortActive.String() {
			s.Reason = "it came up after this daemon's start: headrace upgrade takes it in"
		}
	}
	return s
}
