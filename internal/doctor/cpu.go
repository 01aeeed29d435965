package doctor

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
)

func (h *host) checkCPU() Check {
	const name = "CPU"
	detail := fmt.Sprintf("%d cores, %s", runtime.NumCPU(), runtime.GOARCH)
	flags := h.field("proc/cpuinfo", "flags")
	if runtime.GOARCH != "amd64" || flags == "" {
		return yes(name, detail)
	}
	if hasWord(flags, "avx512f") {
		detail += ", AVX-512"
	}
	if hasWord(flags, "avx2") && hasWord(flags, "fma") {
		return yes(name, detail+", AVX2")
	}
	return lacking(name, detail, "the reference engine uses its slow Go kernels here; use a CPU with AVX2 and FMA", "")
}

// checkGovernor looks at how the kernel chooses the cores' frequency: a core that sleeps deep answers a completion late.
func (h *host) checkGovernor() Check {
	const name, dir = "CPU governor", "sys/devices/system/cpu/"
	seen := make(map[string]int)
	for _, cpu := range h.list(dir) {
		if g := h.text(dir + cpu + "/cpufreq/scaling_governor"); g != "" {
			seen[g]++
		}
	}
	switch {
	case len(seen) == 0:
		return unknown(name, "this host does not say; in a virtual machine its host decides")
	case len(seen) == 1 && seen["performance"] > 0:
		return yes(name, "performance")
	}
	var words []string
	for _, g := range slices.Sorted(maps.Keys(seen)) {
		words = append(words, fmt.Sprintf("%s on %d", g, seen[g]))
	}
	return lacking(name, strings.Join(words, ", "), "cores slow down between completions: latency of small transfers rises",
		"echo performance | tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")
}
