package rdma

import (
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
)

// spot is where a region's memory lies.
type spot struct {
	device place           // whose memory it is; its pci is "" for the host's
	nodes  map[int]float64 // of the host's: which share of the pages is on which NUMA node; empty: not known
}

// How near a port is to memory: about the share of its rate that gets through. Those of devices are rules of thumb for
// transfers from card to card: below one switch or root port, over the root complex, over the processor's mesh, between
// processors.
const (
	nearSwitch  = 1.0
	nearRoot    = 0.9
	nearNode    = 0.7
	nearForeign = 0.2
	// Host memory of another node: 0.4 and this, by the firmware's distance. Processors pass it on at nearly full rate.
	nearHost = 0.6
	// distanceLocal is what the firmware calls the distance of a node from itself.
	distanceLocal = 10
)

// nearness says how near a port is to memory, and in which relation the two stand.
func (s sysfs) nearness(p *place, m *spot) (near float64, how string) {
	if m.device.pci != "" {
		return nearDevice(p, &m.device)
	}
	if p.numa < 0 || len(m.nodes) == 0 {
		return 1, ""
	}
	most, best := -1, 0.0
	for node, share := range m.nodes {
		near += share * s.nearHost(p.numa, node)
		if share > best || share == best && node < most {
			most, best = node, share
		}
	}
	if most == p.numa {
		return near, fmt.Sprintf("on NUMA node %d like its memory", p.numa)
	}
	return near, fmt.Sprintf("on NUMA node %d, the memory on %d", p.numa, most)
}

func (s sysfs) nearHost(a, b int) float64 {
	if a == b {
		return 1
	}
	return 1 - nearHost + nearHost*distanceLocal/float64(max(s.distance(a, b), distanceLocal))
}

func nearDevice(p, d *place) (float64, string) {
	common := 0
	for common < min(len(p.path), len(d.path)) && p.path[common] == d.path[common] {
		common++
	}
	switch {
	case len(p.path) == 0 || len(d.path) == 0:
		return 1, ""
	case common >= 2:
		return nearSwitch, "below the same PCIe port " + p.path[common-1] + " as " + d.pci
	case common == 1:
		return nearRoot, "at the same PCIe root " + p.path[0] + " as " + d.pci
	case p.numa >= 0 && p.numa == d.numa:
		return nearNode, fmt.Sprintf("on NUMA node %d like %s", p.numa, d.pci)
	case p.numa >= 0 && d.numa >= 0:
		return nearForeign, fmt.Sprintf("on NUMA node %d, %s on %d", p.numa, d.pci, d.numa)
	}
	return nearNode, "at another PCIe root than " + d.pci
}

// distance is how far one NUMA node is from another, as the firmware has it: 10 is itself, 20 about twice as far.
func (s sysfs) distance(a, b int) int {
	dirs, _ := filepath.Glob(s.path("devices/system/node/node*"))
	var nodes []int
	for _, d := range dirs {
		if n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(d), "node")); err == nil {
			nodes = append(nodes, n)
		}
	}
	slices.Sort(nodes)
	row := strings.Fields(s.word("devices/system/node", "node"+strconv.Itoa(a), "distance"))
	i := slices.Index(nodes, b)
	if i < 0 || i >= len(row) {
		return 2 * distanceLocal
	}
	n, err := strconv.Atoi(row[i])
	if err != nil {
		return 2 * distanceLocal
	}
	return n
}

// spotOf finds out where a region's memory lies. Its pages are there: it is registered.
func (s sysfs) spotOf(r *transfer.Region) spot {
	if r.Hostless() {
		return spot{device: s.function(r.DMABuf().Device)}
	}
	return spot{device: nowhere, nodes: nodesOf(r.Bytes())}
}

// nodeSamples is how many pages of a region are looked at.
const nodeSamples = 64

// nodesOf gives the share of some memory's pages on each NUMA node, nil where the kernel does not say.
func nodesOf(mem []byte) map[int]float64 {
	if len(mem) == 0 {
		return nil
	}
	page := unix.Getpagesize()
	n := min(nodeSamples, (len(mem)+page-1)/page)
	pages, status := make([]uintptr, n), make([]int32, n)
	for i := range pages {
		pages[i] = uintptr(addressOf(mem)) + uintptr(i*(len(mem)/n)&^(page-1))
	}
	_, _, errno := unix.Syscall6(unix.SYS_MOVE_PAGES, 0, uintptr(n), uintptr(unsafe.Pointer(&pages[0])), 0, uintptr(unsafe.Pointer(&status[0])), 0)
	runtime.KeepAlive(mem)
	if errno != 0 {
		return nil
	}
	shares, known := make(map[int]float64), 0.0
	for _, node := range status {
		if node >= 0 { // else there is no page, or it is not to be known
			shares[int(node)]++
			known++
		}
	}
	for node := range shares {
		shares[node] /= known
	}
	return shares
}

// Place implements transfer.Placed.
func (l *link) Place(lane int) func(*transfer.Region) float64 {
	x := l.lane(lane)
	if x == nil {
		return nil
	}
	rail, t := x.rail.index, l.t
	return func(r *transfer.Region) float64 {
		if g := t.registered(r); g != nil {
			return g.near[rail]
		}
		return 1
	}
}

// rank orders the ports that are used by how near they are to the regions and how fast, and adds it to their reasons.
func rank(list []transfer.PortStatus, ports []*port, spots []spot, sys sysfs) {
	type ranked struct {
		i     int
		worth float64
		hows  []string
	}
	var used []ranked
	for i := range list {
		if !list[i].Used {
			continue
		}
		u := ranked{i: i, worth: float64(max(list[i].RateMbps, 1))}
		near := 0.0
		for _, m := range spots {
			n, how := sys.nearness(&ports[i].at, &m)
			near += n / float64(len(spots))
			if how != "" && !slices.Contains(u.hows, how) {
				u.hows = append(u.hows, how)
			}
		}
		if len(spots) > 0 {
			u.worth *= near
		}
		used = append(used, u)
	}
	slices.SortStableFunc(used, func(a, b ranked) int {
		switch {
		case a.worth > b.worth:
			return -1
		case a.worth < b.worth:
			return 1
		}
		return 0
	})
	for n, u := range used {
		p := &list[u.i]
		p.Rank = n + 1
		if len(u.hows) > 0 {
			slices.Sort(u.hows)
			p.Reason += "; " + strings.Join(u.hows, ", ")
		}
	}
}
