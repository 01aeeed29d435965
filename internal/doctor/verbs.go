package doctor

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
)

const badDescriptor = "bad file descriptor"

// checkVerbs goes from what everything else needs to what needs everything else.
func (h *host) checkVerbs(devices []*device) []Check {
	v := h.verbs()
	checks := []Check{h.checkLibrary(v), h.checkModules(), h.checkKernelDevices(devices)}
	if len(devices) > 0 {
		checks = append(checks, h.checkDeviceFiles(devices))
	}
	if v.State == cgo.Listed && len(devices) > 0 {
		checks = append(checks, h.checkProviders(v, devices))
	}
	return checks
}

func (h *host) checkLibrary(v cgo.Verbs) Check {
	const name = "library"
	switch v.State {
	case cgo.Listed:
		return yes(name, "libibverbs is there").forRDMA()
	case cgo.Failed:
		c := unknown(name, "libibverbs does not list devices: "+v.Detail)
		c.Remedy = v.Remedy()
		return c
	case cgo.NoLibrary:
		return lacking(name, v.Reason(), "transfers use TCP and shared memory without it", h.install("libibverbs1 ibverbs-providers", "libibverbs")).forRDMA()
	}
	return lacking(name, v.Reason(), v.Remedy(), "").forRDMA()
}

// checkModules looks at what programs need of the kernel, whatever the device.
func (h *host) checkModules() Check {
	const name, module = "kernel modules", "ib_uverbs"
	loaded, there := h.module(module)
	switch {
	case loaded || h.exists("sys/class/infiniband_verbs"):
		return yes(name, module+" is loaded").forRDMA()
	case there:
		return lacking(name, module+" is not loaded", "programs reach RDMA devices through it", "modprobe "+module).forRDMA()
	}
	remedy, command := h.noModule(module)
	return lacking(name, module+" is not loaded, and there is none to load", remedy, command).forRDMA()
}

// rdmaDrivers names the RDMA half of network drivers that have one.
var rdmaDrivers = map[string]string{
	"mlx5_core": "mlx5_ib", "mlx4_core": "mlx4_ib", "bnxt_en": "bnxt_re", "ice": "irdma", "qede": "qedr", "hns3": "hns_roce_hw_v2",
}

// checkKernelDevices wants one device, of hardware if there is any.
func (h *host) checkKernelDevices(devices []*device) Check {
	const name = "devices"
	if len(devices) > 0 {
		var words []string
		for _, d := range devices {
			words = append(words, d.String())
		}
		return yes(name, strings.Join(words, ", ")).forRDMA()
	}
	for _, pci := range h.list("sys/bus/pci/devices") {
		module := rdmaDrivers[h.link("sys/bus/pci/devices/"+pci+"/driver")]
		if loaded, there := h.module(module); module != "" && there && !loaded {
			return lacking(name, "none, though the card at "+pci+" can do it", "its driver's RDMA half is not loaded", "modprobe "+module).forRDMA()
		}
	}
	loaded, there := h.module("rdma_rxe")
	if !there {
		remedy, command := h.noModule("rdma_rxe")
		return lacking(name, "none", "fit an RDMA card; for soft RoCE, "+remedy, command).forRDMA()
	}
	add := "rdma link add rxe0 type rxe netdev " + h.ethernet()
	if !loaded {
		add = "modprobe rdma_rxe && " + add
	}
	return lacking(name, "none", "fit an RDMA card, or have soft RoCE on an Ethernet interface: it works everywhere and is slow", add).forRDMA()
}

func (d *device) String() string {
	switch {
	case d.soft && len(d.ports) > 0:
		return d.name + " (soft RoCE on " + d.ports[0].netdev + ")"
	case d.driver != "":
		return d.name + " (" + d.driver + ")"
	}
	return d.name
}

// ethernet is the interface that soft RoCE would best sit on: one that is up, of hardware if there is any.
func (h *host) ethernet() string {
	const dir = "sys/class/net/"
	best, rank := "INTERFACE", 0
	for _, name := range h.list(dir) {
		if h.text(dir+name+"/type") != "1" || h.exists(dir+name+"/bridge") || h.exists(dir+name+"/master") {
			continue
		}
		r := 1
		if h.up(name) {
			r += 2
		}
		if h.exists(dir + name + "/device") {
			r++
		}
		if r > rank {
			best, rank = name, r
		}
	}
	return best
}

// checkDeviceFiles wants this user to be able to open the devices.
func (h *host) checkDeviceFiles(devices []*device) Check {
	const name = "device files"
	var files, missing, make, closed []string
	for _, d := range devices {
		if d.verbs == "" {
			continue
		}
		file := "/dev/infiniband/" + d.verbs
		files = append(files, file)
		if !h.exists(file) {
			major, minor, _ := strings.Cut(h.text("sys/class/infiniband_verbs/"+d.verbs+"/dev"), ":")
			missing, make = append(missing, file), append(make, fmt.Sprintf("mknod -m 0666 %s c %s %s", file, major, minor))
		} else if err := h.access(file); err != nil {
			closed = append(closed, file)
		}
	}
	switch {
	case len(missing) > 0:
		return lacking(name, strings.Join(missing, ", ")+" is not there", "in a container: start it with --device /dev/infiniband --cap-add IPC_LOCK; on the host udev makes it, or this",
			"mkdir -p /dev/infiniband && "+strings.Join(make, " && ")).forRDMA()
	case len(closed) > 0:
		return lacking(name, fmt.Sprintf("user %d may not open %s", unix.Getuid(), strings.Join(closed, ", ")),
			"the rules of package rdma-core open it to all at every start ("+h.install("rdma-core", "rdma-core")+"); until the next one", "chmod 0666 "+strings.Join(closed, " ")).forRDMA()
	case len(files) == 0:
		return unknown(name, "the kernel does not say which file a device has")
	}
	return yes(name, strings.Join(files, ", ")).forRDMA()
}

// checkProviders wants libibverbs to know every device that the kernel has. It can read and write the device's file by
// now, or says no here for that reason.
func (h *host) checkProviders(v cgo.Verbs, devices []*device) Check {
	const name = "providers"
	var without []string
	for _, d := range devices {
		if d.verbs != "" && !h.exists("/dev/infiniband/"+d.verbs) {
			return unknown(name, "there is no device file to try them with")
		}
		if !slices.Contains(v.Devices, d.name) {
			without = append(without, d.name)
		}
	}
	if len(without) > 0 {
		return lacking(name, "libibverbs has none for "+strings.Join(without, ", "), "the part of the driver that goes into programs is a library of its own (libNAME-rdmavN.so, with NAME.driver in /etc/libibverbs.d)",
			h.install("ibverbs-providers", "libibverbs")).forRDMA()
	}
	return yes(name, "libibverbs has one for every device").forRDMA()
}
