package doctor

import (
	"fmt"
	"strings"

	"github.com/headrace/headrace/cgo"
)

// gpus is what NVIDIA's driver says.
type gpus struct {
	list           []gpu
	version        int // of CUDA, as 12040
	reason, remedy string
	unsure         bool // the driver is there and answers with an error
}

type gpu struct {
	name   string
	memory uint64
	// hint says whether cards reach its memory, and remedy what to do where they do not.
	hint, remedy string
}

// askCUDA asks the driver, which is opened at run time.
func askCUDA(kernelModules string) (g gpus) {
	found := cgo.ProbeCUDA()
	g.version, g.reason, g.remedy = found.Version, found.Reason(), found.Remedy()
	g.unsure = found.State == cgo.CUDAFailed && found.Code != cgo.CUDANoDevice
	for i := range found.Devices {
		d := &found.Devices[i]
		one := gpu{name: d.Name(), memory: d.Memory}
		one.hint, one.remedy = d.PeerHint(kernelModules)
		g.list = append(g.list, one)
	}
	return g
}

const nvidia = "0x10de"

// cards counts the GPUs of a maker on the bus, with or without a driver.
func (h *host) cards(vendor string) (n int) {
	for _, pci := range h.list(pciDir) {
		if h.text(pciDir+pci+"/vendor") == vendor && strings.HasPrefix(h.text(pciDir+pci+"/class"), "0x03") {
			n++
		}
	}
	return n
}

func (h *host) checkGPUs(devices []*device) []Check {
	const name = "GPUs"
	g := h.cuda(h.text("proc/modules"))
	fitted := h.cards(nvidia)
	switch {
	case len(g.list) > 0:
		return []Check{yes(name, g.String()), h.checkReach(&g, devices)}
	case g.unsure:
		c := unknown(name, g.reason)
		c.Remedy = g.remedy
		return []Check{c}
	case fitted == 0:
		return []Check{yes(name, "none: engines on this host lend host memory")}
	}
	c := lacking(name, fmt.Sprintf("%d of NVIDIA on the bus: %s", fitted, g.reason), g.remedy, "")
	if loaded, there := h.module("nvidia"); there && !loaded {
		c.Command = "modprobe nvidia"
	}
	return []Check{c}
}

func (g *gpus) String() string {
	var words []string
	for i := 0; i < len(g.list); {
		n := i
		for n < len(g.list) && g.list[n].name == g.list[i].name {
			n++
		}
		words = append(words, fmt.Sprintf("%d x %s (%d GB)", n-i, g.list[i].name, g.list[i].memory/1e9))
		i = n
	}
	return fmt.Sprintf("%s, CUDA %d.%d", strings.Join(words, ", "), g.version/1000, g.version%1000/10)
}

// checkReach looks whether an RDMA device reaches the GPUs' memory: the driver must export it and the device take it.
func (h *host) checkReach(g *gpus, devices []*device) Check {
	const name = "GPU memory over RDMA"
	for _, one := range g.list {
		if one.remedy != "" {
			return lacking(name, one.name+": "+one.hint, one.remedy, "")
		}
	}
	for _, d := range devices {
		if d.libErr == nil && d.lib.dmabuf == nil {
			return yes(name, g.list[0].hint+", with "+d.name)
		}
	}
	if len(devices) == 0 {
		return unknown(name, g.list[0].hint+"; there is no RDMA device to try it with")
	}
	return lacking(name, g.list[0].hint+", but no RDMA device takes dma-bufs", "see the devices' dma-buf above; until then engines stage over pinned host memory", "")
}

func (h *host) checkDMABuf(d *device) Check {
	name := d.name + " dma-buf"
	switch {
	case d.libErr != nil:
		return unknown(name, d.libErr.Error())
	case d.lib.dmabuf == nil:
		return yes(name, "the device registers memory of other devices")
	case d.soft:
		return lacking(name, "soft RoCE registers host memory only", "GPU memory takes a card", "")
	}
	return lacking(name, "the device does not register memory of other devices: "+errno(d.lib.dmabuf), "GPU memory needs Linux 5.12 or newer and a driver that takes dma-bufs; nvidia-peermem is no help, as it serves only the process that owns the memory", "")
}
