package rdma

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/Mellanox/rdmamap"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// setUp makes the virtual functions' network interfaces usable, and waits for their RDMA devices.
func (k *keeper) setUp(cfg *Config) error {
	vfs := k.functions()
	if len(cfg.VFAddresses) > len(vfs) {
		return fmt.Errorf("%d addresses for %d virtual functions", len(cfg.VFAddresses), len(vfs))
	}
	end := time.Now().Add(k.wait)
	netdevs := make([]string, len(vfs))
	for i, vf := range vfs {
		if !k.until(end, func() bool {
			if names := k.sys.netdevsOf(vf); len(names) > 0 {
				netdevs[i] = names[0]
			}
			return netdevs[i] != ""
		}) {
			return fmt.Errorf("virtual function %s has no network interface after %v: %s", vf, k.wait, k.undriven(vf))
		}
		if err := k.setLink(cfg, i, netdevs[i]); err != nil {
			return fmt.Errorf("set up %s, virtual function %s: %w", netdevs[i], vf, err)
		}
	}
	for i, vf := range vfs {
		if !k.until(end, func() bool { return k.ready(vf, netdevs[i]) }) {
			// It may yet come, and status says what it lacks.
			k.log.Warn("a virtual function carries no RDMA yet", "function", vf, "netdev", netdevs[i], "remedy", k.remedy(netdevs[i]))
		}
	}
	return nil
}

func (k *keeper) setLink(cfg *Config, i int, netdev string) error {
	if cfg.VFMTU > 0 {
		if err := k.links.setMTU(netdev, cfg.VFMTU); err != nil {
			return fmt.Errorf("set its MTU to %d (it can have no more than its physical function): %w", cfg.VFMTU, err)
		}
	}
	if err := k.links.setUp(netdev); err != nil {
		return err
	}
	if i < len(cfg.VFAddresses) {
		return k.links.addAddress(netdev, cfg.VFAddresses[i])
	}
	return nil
}

// until waits for the kernel, which tells nobody when it is done with a function.
func (k *keeper) until(end time.Time, done func() bool) bool {
	for !done() {
		if time.Now().After(end) {
			return false
		}
		time.Sleep(vfLook)
	}
	return true
}

// undriven says why a function may have no driver.
func (k *keeper) undriven(vf string) string {
	pf := k.sys.functionsOf(vf).pf
	if k.sys.word("bus/pci/devices", pf, "sriov_drivers_autoprobe") == "0" {
		return "drivers are kept from new functions: echo 1 > /sys/bus/pci/devices/" + pf + "/sriov_drivers_autoprobe"
	}
	return "load the driver of its kind (modprobe mlx5_core, igbvf, iavf, ...)"
}

// remedy is for a function that has a network interface and carries nothing.
func (k *keeper) remedy(netdev string) string {
	if !k.sys.hasLink(netdev) {
		return "its interface has no link: check its physical function's, and the cable"
	}
	return "check that its driver has RDMA; where it has not, soft RoCE has: rdma link add rxe9 type rxe netdev " + netdev
}

// carries says whether a function has an RDMA port that is up. Its link comes up seconds after its interface: the card
// resets itself when it makes functions.
func (k *keeper) carries(vf, netdev string) bool { return k.carriesOver(vf, netdev, rdmaDevices) }

func rdmaDevices(vf, netdev string) []string {
	devices := rdmamap.GetRdmaDevicesForPcidev(vf)
	if d, err := rdmamap.GetRdmaDeviceForNetdevice(netdev); err == nil {
		devices = append(devices, d)
	}
	return devices
}

func (k *keeper) carriesOver(vf, netdev string, devices func(vf, netdev string) []string) bool {
	if !k.sys.hasLink(netdev) {
		return false
	}
	for _, d := range devices(vf, netdev) {
		if k.sys.portState(d, 1) == "ACTIVE" {
			return true
		}
	}
	return false
}

// kernelLinks are the host's network interfaces.
type kernelLinks struct{}

func (kernelLinks) isUp(name string) (bool, error) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return false, err
	}
	return l.Attrs().Flags&net.FlagUp != 0, nil
}

func (kernelLinks) setUp(name string) error {
	return onLink(name, netlink.LinkSetUp)
}

func (kernelLinks) setMTU(name string, mtu int) error {
	return onLink(name, func(l netlink.Link) error { return netlink.LinkSetMTU(l, mtu) })
}

func (kernelLinks) addAddress(name string, a netip.Prefix) error {
	return onLink(name, func(l netlink.Link) error {
		mask := net.CIDRMask(a.Bits(), a.Addr().BitLen())
		err := netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: a.Addr().AsSlice(), Mask: mask}})
		if errors.Is(err, unix.EEXIST) {
			return nil // of the daemon that this one shares the function with
		}
		return err
	})
}

func onLink(name string, do func(netlink.Link) error) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	err = do(l)
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: run the daemon as root or with CAP_NET_ADMIN", err)
	}
	return err
}

// ParseAddresses reads addresses with their prefixes, as 10.1.0.5/24.
func ParseAddresses(words []string) (list []netip.Prefix, err error) {
	for _, w := range words {
		p, err := netip.ParsePrefix(strings.TrimSpace(w))
		if err != nil || p.Bits() == 0 {
			return nil, fmt.Errorf("address %q: use one with its prefix, as 10.1.0.5/24", w)
		}
		list = append(list, p)
	}
	return list, nil
}
