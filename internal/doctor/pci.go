package doctor

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

const pciDir = "sys/bus/pci/devices/"

// checkLink wants a card to have the lanes and the speed that it was made for.
func (h *host) checkLink(d *device) Check {
	name := d.name + " PCIe link"
	dir := pciDir + d.pci + "/"
	speed, speedMax := h.text(dir+"current_link_speed"), h.text(dir+"max_link_speed")
	width, widthMax := h.text(dir+"current_link_width"), h.text(dir+"max_link_width")
	now := transfers(speed) * transfers(width)
	most := transfers(speedMax) * transfers(widthMax)
	detail := fmt.Sprintf("%s, %s lanes", speed, width)
	switch {
	case now == 0 || most == 0:
		return unknown(name, "the kernel does not say")
	case now < most:
		return lacking(name, fmt.Sprintf("%s of %s, %s lanes", detail, speedMax, widthMax), "seat the card in a slot of that speed and width, or look for a riser, a cable or a BIOS setting that limits it", "")
	}
	return yes(name, detail)
}

// transfers is the number that a text begins with: "16.0 GT/s PCIe", "16".
func transfers(s string) float64 {
	n, _ := strconv.ParseFloat(strings.Fields(s + " -")[0], 64)
	return n
}

// What is read of a device's configuration: see the PCI and PCI Express base specifications.
const (
	pciCapabilities = 0x34  // offset of the first capability
	pciExtended     = 0x100 // of the first extended one
	pciCapExpress   = 0x10
	pciExtACS       = 0x0d
	expressControl  = 8 // offset of the device control register in its capability
	controlRelaxed  = 1 << 4
	acsControl      = 6
	acsRedirect     = 1<<2 | 1<<3 // requests and completions between peers go up to the root complex
)

// capability gives a device's capability from its configuration, nil where there is none or it could not be read.
func capability(config []byte, id byte) []byte {
	if len(config) <= pciCapabilities {
		return nil
	}
	at := int(config[pciCapabilities])
	for range 48 { // there is no room for more
		if at < 0x40 || at+16 > len(config) {
			return nil
		}
		if config[at] == id {
			return config[at:]
		}
		at = int(config[at+1])
	}
	return nil
}

// extended is capability for those of PCI Express.
func extended(config []byte, id uint16) []byte {
	at := pciExtended
	for range 1024 {
		if at < pciExtended || at+8 > len(config) {
			return nil
		}
		head := uint32(config[at]) | uint32(config[at+1])<<8 | uint32(config[at+2])<<16 | uint32(config[at+3])<<24
		if uint16(head) == id && head != 0 {
			return config[at:]
		}
		at = int(head >> 20)
	}
	return nil
}

func (h *host) config(pci string) []byte {
	b, err := fs.ReadFile(h.root, pciDir+pci+"/config")
	if err != nil {
		return nil
	}
	return b
}

// checkOrdering looks whether a card may let writes pass each other on the bus. Nothing is to be done about either: no
// registration of ours asks for it, as fences rest on completions that come behind the bytes they speak for.
func (h *host) checkOrdering(d *device) Check {
	name := d.name + " relaxed ordering"
	express := capability(h.config(d.pci), pciCapExpress)
	if express == nil {
		return unknown(name, "its configuration can be read by root only")
	}
	if express[expressControl]&controlRelaxed != 0 {
		return yes(name, "the card may; Headrace does not ask for it")
	}
	return yes(name, "the card may not; Headrace does not ask for it either")
}

// checkIOMMU looks whether each of a card's accesses is translated.
func (h *host) checkIOMMU(d *device) Check {
	name := d.name + " IOMMU"
	group := pciDir + d.pci + "/iommu_group"
	kind := h.text(group + "/type")
	switch {
	case !h.exists(group):
		return yes(name, "off")
	case kind == "identity":
		return yes(name, "passes through")
	case kind == "":
		if cmdline := h.text("proc/cmdline"); hasWord(cmdline, "iommu=pt") || hasWord(cmdline, "iommu.passthrough=1") {
			return yes(name, "passes through (iommu=pt)")
		}
		return unknown(name, "on; the kernel does not say how")
	}
	const remedy = "each access is translated: registration and transfers cost more, and cards do not reach each other directly. Have the kernel pass devices through, and boot again"
	command := `echo 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=pt"' > /etc/default/grub.d/iommu.cfg && update-grub`
	if h.distribution() == "rhel" {
		command = "grubby --update-kernel=ALL --args=iommu=pt"
	}
	return lacking(name, "translates ("+kind+")", remedy, command)
}

// checkACS looks whether bridges above the card send what it writes to a GPU beside it up to the processor.
func (h *host) checkACS(d *device) Check {
	name := d.name + " way to GPUs"
	var redirecting []string
	read := false
	for _, bridge := range h.bridges(d.pci) {
		config := h.config(bridge)
		read = read || len(config) > pciExtended
		if acs := extended(config, pciExtACS); len(acs) > acsControl && acs[acsControl]&acsRedirect != 0 {
			redirecting = append(redirecting, bridge)
		}
	}
	switch {
	case len(redirecting) > 0:
		var set []string
		for _, b := range redirecting {
			set = append(set, "setpci -s "+b+" ECAP_ACS+6.w=0000")
		}
		return lacking(name, "access control (ACS) of the bridge at "+strings.Join(redirecting, ", ")+" sends it by the processor", "on a host without virtual machines it may be switched off, at each start; with GPUs behind the same switch that doubles rates",
			strings.Join(set, " && "))
	case !read:
		return unknown(name, "the bridges' configuration can be read by root only, or there is none")
	}
	return yes(name, "no bridge sends it by the processor")
}

// bridges are what lies between a device and the processor.
func (h *host) bridges(pci string) (up []string) {
	to, err := fs.ReadLink(h.root, pciDir+pci)
	if err != nil {
		return nil
	}
	for dir := path.Dir(to); ; dir = path.Dir(dir) {
		name := path.Base(dir)
		if strings.Count(name, ":") != 2 {
			return up
		}
		up = append(up, name)
	}
}

// checkVFs looks at every card that has virtual functions.
func (h *host) checkVFs() (checks []Check) {
	var seen []string
	for _, netdev := range h.list("sys/class/net") {
		dir := "sys/class/net/" + netdev + "/device/"
		total, ok := h.number(dir + "sriov_totalvfs")
		pci := h.link("sys/class/net/" + netdev + "/device")
		if !ok || total == 0 || slices.Contains(seen, pci) {
			continue
		}
		seen = append(seen, pci)
		name := netdev + " virtual functions"
		n, ok := h.number(dir + "sriov_numvfs")
		switch {
		case !ok:
			checks = append(checks, unknown(name, "the kernel does not say"))
		case n > 0:
			checks = append(checks, yes(name, fmt.Sprintf("%d of %d made", n, total)))
		case !h.up(netdev):
			checks = append(checks, lacking(name, fmt.Sprintf("none of %d made, and %s is switched off", total, netdev), "needed where engines or daemons get a port of their own",
				fmt.Sprintf("ip link set dev %s up && echo %d > /%ssriov_numvfs", netdev, min(total, vfsWanted), dir)))
		default:
			checks = append(checks, lacking(name, fmt.Sprintf("none of %d made", total), "needed where engines or daemons get a port of their own",
				fmt.Sprintf("echo %d > /%ssriov_numvfs", min(total, vfsWanted), dir)))
		}
	}
	return checks
}

// vfsWanted is one for each of a few daemons.
const vfsWanted = 4
