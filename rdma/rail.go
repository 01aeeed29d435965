package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/headrace/headrace/cgo"
)

// rail is a port of a device that carries traffic, with the device opened for it.
type rail struct {
	index  int // in the transport's list, which the other end names it by
	name   string
	port   int
	dev    *cgo.Device
	pd     *cgo.PD
	attr   cgo.DeviceAttr
	state  cgo.PortAttr
	gid    cgo.GID
	netdev string // of a RoCE port
	numa   int    // -1 where the host does not say
}

// findRails opens every port that can be used, or says of each why not.
func findRails(cfg *Config) ([]*rail, error) {
	v := cgo.Probe()
	if err := v.Err(); err != nil {
		return nil, fmt.Errorf("%w; %s", err, v.Remedy())
	}
	var rails []*rail
	var whys []error
	for _, name := range v.Devices {
		if len(cfg.Devices) > 0 && !slices.Contains(cfg.Devices, name) {
			whys = append(whys, fmt.Errorf("%s is not among the devices to be used", name))
			continue
		}
		found, err := openDevice(name, cfg)
		whys = append(whys, err)
		rails = append(rails, found...)
	}
	if len(rails) == 0 {
		return nil, fmt.Errorf("no RDMA port can be used: %w", errors.Join(whys...))
	}
	for i, r := range rails {
		r.index = i
	}
	return rails, nil
}

// openDevice gives the usable ports of a device, each with a device handle of its own, and why others are not.
func openDevice(name string, cfg *Config) (rails []*rail, err error) {
	ports := 1
	for port := 1; port <= ports; port++ {
		r := &rail{name: name, port: port, numa: numaNode(name)}
		attr, rerr := r.open(cfg)
		if rerr != nil {
			err = errors.Join(err, fmt.Errorf("port %d of %s: %w", port, name, rerr), r.close())
			continue
		}
		ports = int(attr.Ports)
		rails = append(rails, r)
	}
	return rails, err
}

func (r *rail) open(cfg *Config) (a cgo.DeviceAttr, err error) {
	if r.dev, err = cgo.Open(r.name); err != nil {
		return a, err
	}
	if r.attr, err = r.dev.Attr(); err != nil {
		return a, err
	}
	if r.state, err = r.dev.Port(r.port); err != nil {
		return a, err
	}
	if r.state.State != cgo.PortActive {
		return a, fmt.Errorf("it is %v, need it active: check the cable and `ip link`", r.state.State)
	}
	if r.gid, err = r.address(cfg); err != nil {
		return a, err
	}
	if r.pd, err = r.dev.NewPD(); err != nil {
		return a, err
	}
	r.netdev = netdevOf(r.gid.IfIndex)
	return r.attr, nil
}

// address chooses the address that the other end is told.
func (r *rail) address(cfg *Config) (best cgo.GID, err error) {
	table, err := r.dev.GIDTable(r.port)
	if err != nil {
		return best, err
	}
	return chooseGID(table, r.state.LinkLayer, cfg.GIDIndex)
}

// chooseGID takes the entry with that index if it is not 0; else on InfiniBand the first, on Ethernet one of RoCE v2:
// for an IPv4 address, else for a routable IPv6 address, else any.
func chooseGID(table []cgo.GID, layer cgo.LinkLayer, index int) (best cgo.GID, err error) {
	rank := 0
	for _, g := range table {
		score := 1
		switch {
		case index > 0 && int(g.Index) != index:
			continue
		case index > 0 || layer == cgo.InfiniBand:
		case g.Type != cgo.GIDRoCEv2:
			continue
		case bytes.HasPrefix(g.Addr[:], []byte{10: 0xff, 11: 0xff}):
			score = 3
		case !bytes.HasPrefix(g.Addr[:], []byte{0xfe, 0x80}):
			score = 2
		}
		if score > rank {
			best, rank = g, score
		}
	}
	switch {
	case rank > 0:
		return best, nil
	case index > 0:
		return best, fmt.Errorf("there is no GID %d", index)
	case layer == cgo.InfiniBand:
		return best, errors.New("it has no GID: is the subnet manager running?")
	}
	return best, errors.New("it has no RoCE v2 address: give its network interface an IP address")
}

func (r *rail) String() string {
	return fmt.Sprintf("%s port %d (%s, %v, %d Mb/s, MTU %d, %v index %d)", r.name, r.port, r.netdev, r.state.LinkLayer, r.state.RateMbps(), r.state.ActiveMTU, r.gid.Type, r.gid.Index)
}

func (r *rail) close() error {
	var errs []error
	if r.pd != nil {
		errs = append(errs, r.pd.Close())
	}
	if r.dev != nil {
		errs = append(errs, r.dev.Close())
	}
	return errors.Join(errs...)
}

func numaNode(device string) int {
	b, err := os.ReadFile(filepath.Join("/sys/class/infiniband", device, "device/numa_node"))
	if err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			return n
		}
	}
	return -1
}

// netdevOf names the network interface with that index.
func netdevOf(index uint32) string {
	dirs, _ := filepath.Glob("/sys/class/net/*/ifindex") // the pattern is well formed
	for _, f := range dirs {
		if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == strconv.Itoa(int(index)) {
			return filepath.Base(filepath.Dir(f))
		}
	}
	return ""
}
