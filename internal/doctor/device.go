package doctor

import (
	"fmt"
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

// What a port's addresses are worth, as package rdma chooses among them.
const (
	gidUnusable = iota
	gidLocal    // of the link: no router passes it on
	gidIPv6
	gidIPv4
)

func (g gid) rank() int {
	switch {
	case g.kind != "RoCE v2":
		return gidUnusable
	case strings.HasPrefix(g.text, "0000:0000:0000:0000:0000:ffff:"):
		return gidIPv4
	case strings.HasPrefix(g.text, "fe80:"):
		return gidLocal
	}
	return gidIPv6
}

// best is the address that a channel would use.
func (p *port) best() (best gid, rank int) {
	for _, g := range p.gids {
		if r := g.rank(); r > rank {
			best, rank = g, r
		}
	}
	return best, rank
}

// address writes an IPv4 address as people do.
func (g gid) address() string {
	digits := strings.ReplaceAll(g.text, ":", "")
	if g.rank() != gidIPv4 || len(digits) != 32 {
		return g.text
	}
	v, err := strconv.ParseUint(digits[24:], 16, 32)
	if err != nil {
		return g.text
	}
	return fmt.Sprintf("%d.%d.%d.%d", v>>24, v>>16&0xff, v>>8&0xff, v&0xff)
}
