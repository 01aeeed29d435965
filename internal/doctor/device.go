package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/headrace/headrace/cgo"
)

// device is an RDMA device as the kernel's files describe it, and as the library does where it can.
type device struct {
	name   string
	driver string // of the PCI device
	pci    string // address, "" where it is none
	soft   bool   // soft RoCE: a device on top of a network interface
	verbs  string // uverbsN, its file below /dev/infiniband
	ports  []port

	lib    library
	libErr error
}

// port is one port of a device.
type port struct {
	number       int
	state, layer string
	rate         string
	netdev       string // of RoCE
	gids         []gid
}

// gid is an address of a port.
type gid struct {
	index        int
	text         string // as the kernel writes it: eight groups of four digits
	kind, netdev string
}

// library is what only libibverbs says.
type library struct {
	ports  []cgo.PortAttr // from port 1
	dmabuf error          // nil: the device takes them
}

// askLibrary opens a device.
func askLibrary(name string, ports int) (l library, err error) {
	d, err := cgo.Open(name)
	if err != nil {
		return l, err
	}
	defer d.Close()
	for n := 1; n <= ports; n++ {
		a, err := d.Port(n)
		if err != nil {
			return l, err
		}
		l.ports = append(l.ports, a)
	}
	pd, err := d.NewPD()
	if err != nil {
		return l, err
	}
	defer pd.Close()
	l.dmabuf = takesDMABuf(pd)
	return l, nil
}

// takesDMABuf registers a descriptor that is none: what can register one complains about the descriptor.
func takesDMABuf(pd *cgo.PD) error {
	m, err := pd.RegisterDMABuf(-1, 0, 4096, 0, cgo.LocalWrite)
	if err == nil {
		return m.Close()
	}
	if errno(err) == badDescriptor {
		return nil
	}
	return err
}

const classDir = "sys/class/infiniband/"

// devices lists what the kernel has.
func (h *host) devices() (all []*device) {
	files := make(map[string]string)
	for _, v := range h.list("sys/class/infiniband_verbs") {
		if name := h.text("sys/class/infiniband_verbs/" + v + "/ibdev"); name != "" {
			files[name] = v
		}
	}
	for _, name := range h.list(classDir) {
		d := &device{name: name, verbs: files[name], soft: h.exists(classDir + name + "/parent")}
		if h.link(classDir+name+"/device/subsystem") == "pci" {
			d.pci, d.driver = h.link(classDir+name+"/device"), h.link(classDir+name+"/device/driver")
		}
		for _, p := range h.list(classDir + name + "/ports") {
			if n, err := strconv.Atoi(p); err == nil {
				d.ports = append(d.ports, h.port(d, n))
			}
		}
		slices.SortFunc(d.ports, func(a, b port) int { return a.number - b.number })
		d.lib, d.libErr = h.ports(name, len(d.ports))
		all = append(all, d)
	}
	return all
}

// port reads a port's files.
func (h *host) port(d *device, number int) port {
	dir := fmt.Sprintf("%s%s/ports/%d/", classDir, d.name, number)
	p := port{number: number, layer: h.text(dir + "link_layer"), rate: h.text(dir + "rate")}
	_, p.state, _ = strings.Cut(h.text(dir+"state"), ": ") // "4: ACTIVE"
	for _, name := range h.list(dir + "gids") {
		i, err := strconv.Atoi(name)
		text := h.text(dir + "gids/" + name)
		if err != nil || strings.Trim(text, "0:") == "" {
			continue
		}
		p.gids = append(p.gids, gid{index: i, text: text, kind: h.text(dir + "gid_attrs/types/" + name), netdev: h.text(dir + "gid_attrs/ndevs/" + name)})
	}
	slices.SortFunc(p.gids, func(a, b gid) int { return a.index - b.index })
	if p.netdev = h.text(classDir + d.name + "/parent"); p.netdev == "" && len(p.gids) > 0 {
		p.netdev = p.gids[0].netdev
	}
	if nets := h.list(classDir + d.name + "/device/net"); p.netdev == "" && len(nets) > 0 {
		p.netdev = nets[min(number, len(nets))-1]
	}
	return p
}

// address reads a GID as the kernel writes it.
func (g gid) address() (netip.Addr, error) {
	a, err := netip.ParseAddr(g.text)
	if err != nil || !a.Is6() || a.Zone() != "" {
		return a, fmt.Errorf("%q is no GID: want eight groups of four digits", g.text)
	}
	return a, nil
}

// reach is what package rdma chooses among addresses by.
func (g gid) reach() cgo.Reach {
	a, err := g.address()
	if err != nil || g.kind != cgo.GIDRoCEv2.String() {
		return cgo.ReachNone
	}
	return (&cgo.GID{Addr: a.As16(), Type: cgo.GIDRoCEv2}).Reach()
}

// best is the address that a channel would use.
func (p *port) best() (best gid, reach cgo.Reach) {
	for _, g := range p.gids {
		if r := g.reach(); r > reach {
			best, reach = g, r
		}
	}
	return best, reach
}

// String writes an IPv4 address as people do.
func (g gid) String() string {
	if a, err := g.address(); err == nil && a.Is4In6() {
		return a.Unmap().String()
	}
	return g.text
}
