package doctor

import (
	"fmt"
	"strings"
)

// gpus counts the GPUs of a maker. Displays count too: what they can do, the maker's library knows.
func (h *host) gpus(vendor string) (n int) {
	for _, pci := range h.list(pciDir) {
		if h.text(pciDir+pci+"/vendor") == vendor && strings.HasPrefix(h.text(pciDir+pci+"/class"), "0x03") {
			n++
		}
	}
	return n
}

const nvidia = "0x10de"

func (h *host) checkGPUs(devices []*device) []Check {
	const name = "GPUs"
	n := h.gpus(nvidia)
	driver := h.text("proc/driver/nvidia/version")
	switch {
	case n == 0 && driver == "":
		return []Check{yes(name, "none: engines on this host lend host memory")}
	case driver == "":
		_, there := h.module("nvidia")
		c := lacking(name, fmt.Sprintf("%d of NVIDIA, without a driver", n), "install the driver, or load it", "")
		if there {
			c.Command = "modprobe nvidia"
		}
		return []Check{c}
	}
	version, _, _ := strings.Cut(strings.TrimPrefix(driver, "NVRM version: "), "\n")
	return []Check{yes(name, fmt.Sprintf("%d of NVIDIA, %s", n, strings.Join(strings.Fields(version), " "))), h.checkPeerMemory(devices, driver)}
}

// checkPeerMemory looks whether an RDMA device reaches the GPUs' memory, by one of the two ways there are.
func (h *host) checkPeerMemory(devices []*device, driver string) Check {
	const name = "GPU memory over RDMA"
	open := strings.Contains(driver, "Open Kernel Module")
	peermem, there := h.module("nvidia_peermem")
	for _, d := range devices {
		if d.libErr == nil && d.lib.dmabuf == nil && open {
			return yes(name, "by dma-buf, with "+d.name)
		}
	}
	switch {
	case len(devices) == 0:
		return unknown(name, "there is no RDMA device to try it with")
	case peermem:
		return yes(name, "by nvidia-peermem")
	case there:
		return lacking(name, "no device takes dma-bufs of this driver, and nvidia-peermem is not loaded", "until then engines copy by host memory", "modprobe nvidia-peermem")
	}
	return lacking(name, "no device takes dma-bufs of this driver, and there is no nvidia-peermem", "use the driver's open kernel modules (dma-buf), or a driver package with nvidia-peermem", "")
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
	return lacking(name, "the device does not register memory of other devices: "+errno(d.lib.dmabuf), "GPU memory needs Linux 5.12 or newer and a driver that takes dma-bufs, or nvidia-peermem", "")
}
