package rdma

import (
	"math"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
)

func at2(numa int, path ...string) place {
	return place{pci: path[len(path)-1], path: path, numa: numa}
}

func TestNearness(t *testing.T) {
	sys := tree(t, map[string]string{
		"devices/system/node/node0/distance": "10 21 32", "devices/system/node/node2/distance": "21 10 21", "devices/system/node/node10/distance": "32 21 10",
	})
	nic := at2(0, "pci0000:00", "0000:00:01.0", "0000:01:00.0")
	for _, c := range []struct {
		name string
		p    place
		m    spot
		near float64
		how  string
	}{
		{"GPU at the same switch", nic, spot{device: at2(0, "pci0000:00", "0000:00:01.0", "0000:02:00.0")}, 1, "below the same PCIe port 0000:00:01.0 as 0000:02:00.0"},
		{"GPU at the same root", nic, spot{device: at2(0, "pci0000:00", "0000:00:03.0", "0000:03:00.0")}, 0.9, "at the same PCIe root pci0000:00"},
		{"GPU at the same processor", nic, spot{device: at2(0, "pci0000:40", "0000:40:01.0", "0000:41:00.0")}, 0.7, "on NUMA node 0 like 0000:41:00.0"},
		{"GPU at another processor", nic, spot{device: at2(2, "pci0000:80", "0000:80:01.0", "0000:81:00.0")}, 0.2, "on NUMA node 0, 0000:81:00.0 on 2"},
		{"GPU of which only the root is known", nic, spot{device: at2(-1, "pci0000:80", "0000:80:01.0", "0000:81:00.0")}, 0.7, "at another PCIe root than 0000:81:00.0"},
		{"soft RoCE and a GPU", nowhere, spot{device: at2(2, "pci0000:80", "0000:81:00.0")}, 1, ""},
		{"host memory here", nic, spot{device: nowhere, nodes: map[int]float64{0: 1}}, 1, "on NUMA node 0 like its memory"},
		{"host memory there", nic, spot{device: nowhere, nodes: map[int]float64{2: 1}}, 0.4 + 0.6*10/21, "on NUMA node 0, the memory on 2"},
		{"host memory far away", nic, spot{device: nowhere, nodes: map[int]float64{10: 1}}, 0.4 + 0.6*10/32, "the memory on 10"},
		{"host memory everywhere", nic, spot{device: nowhere, nodes: map[int]float64{0: 0.5, 2: 0.5}}, 0.7 + 0.3*10/21, "on NUMA node 0 like its memory"},
		{"host memory nowhere", nic, spot{device: nowhere}, 1, ""},
		{"a port nowhere", nowhere, spot{device: nowhere, nodes: map[int]float64{2: 1}}, 1, ""},
		{"a node that the firmware does not know", nic, spot{device: nowhere, nodes: map[int]float64{7: 1}}, 0.7, "the memory on 7"},
	} {
		near, how := sys.nearness(&c.p, &c.m)
		if math.Abs(near-c.near) > 1e-9 || !strings.Contains(how, c.how) || how == "" != (c.how == "") {
			t.Errorf("%s: %g, %q, want %g, %q", c.name, near, how, c.near, c.how)
		}
	}
}

func TestNodesOfMemory(t *testing.T) {
	if _, err := os.Stat("/sys/devices/system/node/node0"); err != nil {
		t.Skip("this kernel has no NUMA nodes")
	}
	page := unix.Getpagesize()
	mem, err := unix.Mmap(-1, 0, 256*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	if n := nodesOf(mem); len(n) != 0 {
		t.Errorf("memory that nobody touched is on %v", n)
	}
	for i := 0; i < len(mem); i += page {
		mem[i] = 1
	}
	sum := 0.0
	for _, share := range nodesOf(mem) {
		sum += share
	}
	if math.Abs(sum-1) > 1e-9 {
		if _, err := os.Stat("/proc/self/numa_maps"); err != nil {
			t.Skip("this kernel does not say where pages are")
		}
		t.Errorf("shares add up to %g", sum)
	}
	if n := nodesOf(nil); n != nil {
		t.Errorf("no memory is on %v", n)
	}
}

func TestRanks(t *testing.T) {
	sys := tree(t, map[string]string{"devices/system/node/node0/distance": "10 21", "devices/system/node/node1/distance": "21 10"})
	ports := []*port{{at: at2(1, "pci0000:80", "0000:81:00.0")}, {at: at2(0, "pci0000:00", "0000:01:00.0")}, {at: nowhere}, {at: at2(0, "pci0000:00", "0000:02:00.0")}}
	list := []transfer.PortStatus{
		{Used: true, RateMbps: 200_000, Reason: "IPv4 address"}, {Used: true, RateMbps: 200_000, Reason: "IPv4 address"}, {Reason: "it is down"}, {Used: true, RateMbps: 400_000, Reason: "IPv4 address"},
	}
	spots := []spot{{device: nowhere, nodes: map[int]float64{0: 1}}, {device: nowhere, nodes: map[int]float64{0: 0.9, 1: 0.1}}}
	rank(list, ports, spots, sys)
	if list[0].Rank != 3 || list[1].Rank != 2 || list[2].Rank != 0 || list[3].Rank != 1 {
		t.Errorf("%d %d %d %d", list[0].Rank, list[1].Rank, list[2].Rank, list[3].Rank)
	}
	if list[0].Reason != "IPv4 address; on NUMA node 1, the memory on 0" || list[1].Reason != "IPv4 address; on NUMA node 0 like its memory" || list[2].Reason != "it is down" {
		t.Errorf("%q %q %q", list[0].Reason, list[1].Reason, list[2].Reason)
	}
}
