package rdma

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// sysfs is where the kernel shows its devices. Tests have a tree of their own.
type sysfs string

const kernelTree sysfs = "/sys"

func (s sysfs) path(elem ...string) string {
	return filepath.Join(append([]string{string(s)}, elem...)...)
}

// word reads a file of one word; "" where there is none.
func (s sysfs) word(elem ...string) string {
	b, err := os.ReadFile(s.path(elem...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// number reads a file of one number; none where there is no such file.
func (s sysfs) number(none int, elem ...string) int {
	n, err := strconv.Atoi(s.word(elem...))
	if err != nil {
		return none
	}
	return n
}

// place is where a device sits in the host.
type place struct {
	pci  string   // address of its PCI function, as 0000:3b:00.0; "" for devices made of software alone
	path []string // from the root complex down to the function: pci0000:3a, 0000:3a:00.0, 0000:3b:00.0
	numa int      // -1 where the host does not say
}

var nowhere = place{numa: -1}

var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// placeOf finds the PCI function that a device's folder belongs to.
func (s sysfs) placeOf(dir string) place {
	real, err := filepath.EvalSymlinks(filepath.Join(dir, "device"))
	if err != nil {
		return nowhere
	}
	return s.placeIn(real)
}

// placeIn is placeOf for a folder below /sys/devices.
func (s sysfs) placeIn(real string) place {
	parts := strings.Split(real, "/")
	last, first := -1, -1
	for i, p := range parts {
		if pciAddress.MatchString(p) {
			last = i
		}
		if first < 0 && strings.HasPrefix(p, "pci") {
			first = i
		}
	}
	if last < 0 {
		return nowhere
	}
	p := place{pci: parts[last], path: parts[max(first, 0) : last+1], numa: -1}
	if n, err := os.ReadFile(filepath.Join(strings.Join(parts[:last+1], "/"), "numa_node")); err == nil {
		if v, err := strconv.Atoi(strings.TrimSpace(string(n))); err == nil {
			p.numa = v
		}
	}
	return p
}

// function gives the place of a PCI function. An engine may have named it: nothing but an address is looked for.
func (s sysfs) function(pci string) place {
	if !pciAddress.MatchString(pci) {
		return nowhere
	}
	real, err := filepath.EvalSymlinks(s.path("bus/pci/devices", pci))
	if err != nil {
		return nowhere
	}
	return s.placeIn(real)
}

// netdevIndex names the network interface with that index.
func (s sysfs) netdev(index uint32) string {
	files, _ := filepath.Glob(s.path("class/net/*/ifindex")) // the pattern is well formed
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == strconv.Itoa(int(index)) {
			return filepath.Base(filepath.Dir(f))
		}
	}
	return ""
}

// netdevAt is netdev for an index that is likely the named one's: looking at all is slow on a host with many.
func (s sysfs) netdevAt(likely string, index uint32) string {
	if likely != "" && s.word("class/net", likely, "ifindex") == strconv.Itoa(int(index)) {
		return likely
	}
	return s.netdev(index)
}

// hasLink says whether a network interface passes packets, as far as the kernel says. A port of soft RoCE is active as soon
// as its interface is switched on: what it sends until the link is there is lost, and so are the neighbours' answers.
func (s sysfs) hasLink(netdev string) bool {
	switch s.word("class/net", netdev, "operstate") {
	case "up", "unknown", "": // a dummy interface's is unknown
		return true
	}
	return false
}

// netdevOfPort names the network interface of a device's port: the one that its addresses are of, or its parent.
func (s sysfs) netdevOfPort(device string, port int) string {
	dir := s.path("class/infiniband", device, "ports", strconv.Itoa(port), "gid_attrs/ndevs")
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if b, err := os.ReadFile(filepath.Join(dir, e.Name())); err == nil && len(b) > 1 {
			return strings.TrimSpace(string(b))
		}
	}
	return s.word("class/infiniband", device, "parent") // of soft RoCE
}

// portState is the state of a port as the kernel's files have it now: "4: ACTIVE" reads ACTIVE.
func (s sysfs) portState(device string, port int) string {
	_, state, _ := strings.Cut(s.word("class/infiniband", device, "ports", strconv.Itoa(port), "state"), ": ")
	return state
}

// functions is what a PCI function has to do with SR-IOV.
type functions struct {
	pf    string // of a virtual function: its physical one
	index int    // of a virtual function, from 0
	made  int    // of a physical function: how many virtual ones it has now
	max   int    // and how many it can have, 0: no SR-IOV
}

func (s sysfs) functionsOf(pci string) functions {
	f := functions{index: -1}
	if pci == "" {
		return f
	}
	dir := s.path("bus/pci/devices", pci)
	if pf, err := filepath.EvalSymlinks(filepath.Join(dir, "physfn")); err == nil {
		f.pf = filepath.Base(pf)
		f.index = slices.IndexFunc(s.virtual(f.pf), func(v string) bool { return v == pci })
	}
	f.made, f.max = s.number(0, "bus/pci/devices", pci, "sriov_numvfs"), s.number(0, "bus/pci/devices", pci, "sriov_totalvfs")
	return f
}

// virtual lists the virtual functions of a physical one, in their order.
func (s sysfs) virtual(pf string) []string {
	links, _ := filepath.Glob(s.path("bus/pci/devices", pf, "virtfn*"))
	number := func(link string) int {
		n, _ := strconv.Atoi(strings.TrimPrefix(filepath.Base(link), "virtfn"))
		return n
	}
	slices.SortFunc(links, func(a, b string) int { return cmp.Compare(number(a), number(b)) })
	var vfs []string
	for _, l := range links {
		if real, err := filepath.EvalSymlinks(l); err == nil {
			vfs = append(vfs, filepath.Base(real))
		}
	}
	return vfs
}

// netdevsOf lists the network interfaces of a PCI function.
func (s sysfs) netdevsOf(pci string) []string {
	entries, _ := os.ReadDir(s.path("bus/pci/devices", pci, "net"))
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// namesOf lists what people may call a PCI function: its address, network interfaces and RDMA devices.
func (s sysfs) namesOf(pci string) []string {
	names := append([]string{pci}, s.netdevsOf(pci)...)
	entries, _ := os.ReadDir(s.path("bus/pci/devices", pci, "infiniband"))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// functionNamed gives the address of the PCI function of a network interface, of an RDMA device or of that address; "" where
// there is none.
func (s sysfs) functionNamed(word string) string {
	if pciAddress.MatchString(word) {
		return s.function(word).pci
	}
	if p := s.placeOf(s.path("class/net", word)); p.pci != "" {
		return p.pci
	}
	return s.placeOf(s.path("class/infiniband", word)).pci
}

// physicalFunctions lists the PCI functions with RDMA devices that can have virtual ones; of those named, where some are.
func (s sysfs) physicalFunctions(named []string) (list []string) {
	entries, _ := os.ReadDir(s.path("class/infiniband"))
	for _, e := range entries {
		p := port{device: e.Name(), number: 1, netdev: s.netdevOfPort(e.Name(), 1), at: s.placeOf(s.path("class/infiniband", e.Name()))}
		f := s.functionsOf(p.at.pci)
		if f.max == 0 || f.pf != "" || slices.Contains(list, p.at.pci) || len(named) > 0 && !slices.ContainsFunc(named, p.named) {
			continue
		}
		list = append(list, p.at.pci)
	}
	return list
}

func (f functions) String() string {
	switch {
	case f.pf != "":
		return fmt.Sprintf("virtual function %d of %s", f.index, f.pf)
	case f.max > 0:
		return fmt.Sprintf("%d of %d virtual functions", f.made, f.max)
	}
	return ""
}
