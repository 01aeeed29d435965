package doctor

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/headrace/headrace/cgo"
)

// checkDevice makes all checks about one device.
func (h *host) checkDevice(d *device) (checks []Check) {
	for i := range d.ports {
		p := &d.ports[i]
		at := fmt.Sprintf("%s/%d ", d.name, p.number)
		checks = append(checks, h.checkState(at+"state", d, p), h.checkAddress(at+"address", p), h.checkMTU(at+"MTU", d, p))
		if p.layer == ethernet {
			checks = append(checks, h.checkCongestion(at+"congestion", d, p))
		}
	}
	if d.pci != "" {
		checks = append(checks, h.checkLink(d), h.checkOrdering(d), h.checkIOMMU(d), h.checkACS(d))
	}
	return append(checks, h.checkDMABuf(d))
}

const ethernet = "Ethernet"

// up tells whether somebody switched an interface on.
func (h *host) up(netdev string) bool {
	flags, err := strconv.ParseUint(h.text("sys/class/net/"+netdev+"/flags"), 0, 32)
	const iffUp = 1
	return err == nil && flags&iffUp != 0
}

func (h *host) checkState(name string, d *device, p *port) Check {
	at := ""
	if p.netdev != "" {
		at = ", on " + p.netdev
	}
	switch {
	case p.state == "":
		return unknown(name, "the kernel does not say")
	case p.state == "ACTIVE":
		return yes(name, fmt.Sprintf("active, %s, %s%s", p.layer, p.rate, at)).forRDMA()
	case p.layer == ethernet && p.netdev != "" && !h.up(p.netdev):
		return lacking(name, fmt.Sprintf("%s: interface %s is switched off", strings.ToLower(p.state), p.netdev), "the port follows its interface", "ip link set dev "+p.netdev+" up").forRDMA()
	case p.layer == ethernet:
		return lacking(name, strings.ToLower(p.state)+at, "the interface has no carrier: check cable, transceiver and the switch's port", "").forRDMA()
	case p.state == "INIT" || p.state == "ARMED":
		return lacking(name, strings.ToLower(p.state)+": no subnet manager has set it up", "one host or switch of the network runs it", h.install("opensm", "opensm")+" && systemctl enable --now opensm").forRDMA()
	}
	return lacking(name, strings.ToLower(p.state), "check cable and transceiver; `ibportstate` and the switch know more", "").forRDMA()
}

func (h *host) checkAddress(name string, p *port) Check {
	if p.layer != ethernet {
		if len(p.gids) == 0 {
			return lacking(name, "the port has no GID", "a subnet manager gives it one", h.install("opensm", "opensm")+" && systemctl enable --now opensm").forRDMA()
		}
		return yes(name, "GID index "+strconv.Itoa(p.gids[0].index)+", "+p.gids[0].text)
	}
	netdev := p.netdev
	if netdev == "" {
		netdev = "INTERFACE"
	}
	give := "ip addr add ADDRESS/PREFIX dev " + netdev
	best, reach := p.best()
	switch {
	case reach == cgo.ReachIPv4 || reach == cgo.ReachIPv6:
		return yes(name, fmt.Sprintf("GID index %d, RoCE v2, %s", best.index, best)).forRDMA()
	case reach == cgo.ReachLink:
		return lacking(name, fmt.Sprintf("only of the link (GID index %d, RoCE v2, %s): no router passes it on, and other hosts may not find it", best.index, best.text),
			"RoCE v2 takes its addresses from the interface's: give it one", give).forRDMA()
	case len(p.gids) > 0:
		return lacking(name, fmt.Sprintf("%d GIDs, none of them RoCE v2", len(p.gids)), "RoCE v2 takes its addresses from the interface's: give it one", give).forRDMA()
	}
	return lacking(name, "the port has no GID", "RoCE v2 takes its addresses from the interface's: give it one, and switch it on", give).forRDMA()
}

// RoCE's MTU is the largest power of two that fits into an Ethernet frame beside the headers.
const (
	roceMTU  = 4096
	etherMTU = 4200
)

func (h *host) checkMTU(name string, d *device, p *port) Check {
	if d.libErr != nil || p.number > len(d.lib.ports) {
		why := "libibverbs does not say"
		if d.libErr != nil {
			why = d.libErr.Error()
		}
		return unknown(name, why)
	}
	a := d.lib.ports[p.number-1]
	reach := min(a.MaxMTU, roceMTU)
	ether, known := h.number("sys/class/net/" + p.netdev + "/mtu")
	detail := fmt.Sprintf("%d bytes", a.ActiveMTU)
	if known && p.netdev != "" {
		detail += fmt.Sprintf("; that of %s is %d", p.netdev, ether)
	}
	switch {
	case a.ActiveMTU >= reach:
		return yes(name, detail)
	case p.layer == ethernet && known && ether < etherMTU:
		return lacking(name, fmt.Sprintf("%s: so %d of %d are used", detail, a.ActiveMTU, reach), "larger packets cost less each; the switches and the other hosts must pass them too",
			fmt.Sprintf("ip link set dev %s mtu %d", p.netdev, etherMTU))
	case p.layer == ethernet:
		return lacking(name, fmt.Sprintf("%s: the device could do %d", detail, reach), "the interface's MTU allows more: take the device down and up, or look into the kernel's log", "")
	}
	return lacking(name, fmt.Sprintf("%s of %d", detail, reach), "the subnet manager sets it: mtu=5 for the partition in partitions.conf", "")
}
