package doctor

import (
	"fmt"
	"strings"
)

// hugepagesWanted, of 2 MiB, is a KV cache of 1 GiB.
const hugepagesWanted = 512

// checkHugepages looks at reserved pages, on every NUMA node, and at transparent ones.
func (h *host) checkHugepages() Check {
	const name = "huge pages"
	var nodes []string
	total, without := 0, ""
	for _, node := range h.list("sys/devices/system/node") {
		n, ok := h.number("sys/devices/system/node/" + node + "/hugepages/hugepages-2048kB/nr_hugepages")
		if !ok {
			continue
		}
		if n == 0 && without == "" {
			without = node
		}
		total += n
		nodes = append(nodes, fmt.Sprintf("%s %d", node, n))
	}
	if len(nodes) == 0 {
		n, ok := h.number("proc/sys/vm/nr_hugepages")
		if !ok {
			return unknown(name, "this kernel does not say")
		}
		total = n
	}
	detail := fmt.Sprintf("%d of 2 MiB reserved", total)
	if len(nodes) > 1 {
		detail += " (" + strings.Join(nodes, ", ") + ")"
	}
	thp := h.text("sys/kernel/mm/transparent_hugepage/enabled")
	transparent := thp != "" && !strings.Contains(thp, "[never]")
	switch {
	case total > 0 && without != "" && len(nodes) > 1 && !transparent:
		return lacking(name, detail, "engines on "+without+" find none: reserve some there too",
			fmt.Sprintf("echo %d > /sys/devices/system/node/%s/hugepages/hugepages-2048kB/nr_hugepages", hugepagesWanted, without))
	case total > 0:
		return yes(name, detail)
	case transparent:
		return yes(name, "none reserved; transparent ones are on")
	case thp != "":
		return lacking(name, "none reserved, and transparent ones are off", "fewer page faults and quicker registration of large KV caches",
			"echo madvise > /sys/kernel/mm/transparent_hugepage/enabled && echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled")
	}
	return lacking(name, "none reserved, and this kernel has no transparent ones", "fewer page faults and quicker registration of large KV caches",
		fmt.Sprintf("sysctl -w vm.nr_hugepages=%d", hugepagesWanted))
}
