package rdma

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer"
)

// Config has useful zero values.
type Config struct {
	Devices      []string       // those to use: mlx5_0, mlx5_0:2 for its second port, eth0 or 0000:3b:00.0; empty: all with an active port
	GIDIndex     *int           // in the ports' tables of addresses; nil chooses, on Ethernet a RoCE v2 address, for IPv4 if there is one
	PKeyIndex    int            // in the ports' tables of partition keys
	PKey         uint16         // in place of PKeyIndex where it is not 0: a key that is looked for in the ports' tables
	ServiceLevel int            // 0 to 15
	TrafficClass int            // 0 to 255; DSCP is its upper six bits
	AckTimeout   int            // 1 to 31: an acknowledgement is waited for 4.096 us * 2^n, eight times; 0: 14 (67 ms)
	Spin         time.Duration  // how long to poll for completions before parking; 0 parks at once
	VFs          []VFs          // virtual functions to make, to use in their physical ones' place, and to put back at the end
	VFMTU        int            // of their network interfaces; 0 leaves it
	VFAddresses  []netip.Prefix // for their network interfaces, in their order; none: whoever configures networks here gives them
	StateDir     string         // where it is written down which functions were made; empty: DefaultStateDir
	Op           string         // how pieces are sent: OpWrite (also ""), or OpRead, which has the other end read them
	Logger       *slog.Logger

	taken    []string      // PCI addresses of the virtual functions that were made
	withdraw time.Duration // how long a lane may take to withdraw a lease's windows; 0: withdrawPatience. Emulated machines take longer
}

// The ranges of settings.
const (
	serviceLevelMax = 15
	trafficClassMax = 255
	pkeyIndexMax    = 65535
	gidIndexMax     = 65535
	spinMax         = time.Second
	ackTimeoutMax   = 31 // five bits: timeout in ibv_modify_qp(3)
)

// Validate says which setting cannot be meant.
func (c *Config) Validate() error {
	switch {
	case c.GIDIndex != nil && (*c.GIDIndex < 0 || *c.GIDIndex > gidIndexMax):
		return fmt.Errorf("GID index %d: use auto, or an index of the port's table (show_gids, or headrace doctor)", *c.GIDIndex)
	case c.PKeyIndex < 0 || c.PKeyIndex > pkeyIndexMax:
		return fmt.Errorf("P_Key index %d: use 0 to %d, an index of the port's table", c.PKeyIndex, pkeyIndexMax)
	case c.PKey != 0 && c.PKeyIndex != 0:
		return fmt.Errorf("both P_Key %#04x and P_Key index %d: use one of them", c.PKey, c.PKeyIndex)
	case c.PKey == pkeyMember:
		return fmt.Errorf("P_Key %#04x: it has a membership bit and no partition", c.PKey)
	case c.ServiceLevel < 0 || c.ServiceLevel > serviceLevelMax:
		return fmt.Errorf("service level %d: use 0 to %d", c.ServiceLevel, serviceLevelMax)
	case c.TrafficClass < 0 || c.TrafficClass > trafficClassMax:
		return fmt.Errorf("traffic class %d: use 0 to %d; DSCP d is traffic class 4*d", c.TrafficClass, trafficClassMax)
	case c.Op != "" && c.Op != OpWrite && c.Op != OpRead:
		return fmt.Errorf("operation %q: use %s or %s", c.Op, OpWrite, OpRead)
	case c.AckTimeout < 0 || c.AckTimeout > ackTimeoutMax:
		return fmt.Errorf("acknowledgement timeout %d: use 1 to %d, for 4.096 us * 2^n, or 0 for %d", c.AckTimeout, ackTimeoutMax, ackTimeout)
	case c.Spin < 0 || c.Spin > spinMax:
		return fmt.Errorf("spinning for %v: use 0 to %v", c.Spin, spinMax)
	case c.VFMTU != 0 && (c.VFMTU < 576 || c.VFMTU > 65535):
		return fmt.Errorf("MTU %d of virtual functions: use 576 to 65535, as 4200 for RDMA packets of 4096 bytes", c.VFMTU)
	case len(c.VFs) == 0 && (c.VFMTU > 0 || len(c.VFAddresses) > 0):
		return errors.New("an MTU or addresses for virtual functions, but none are asked for: use --rdma-vfs too")
	}
	for _, d := range c.Devices {
		if d == "" || strings.ContainsAny(d, "/ \t") {
			return fmt.Errorf("device %q: use a name as mlx5_0, mlx5_0:2, eth0 or 0000:3b:00.0", d)
		}
	}
	return nil
}

type transport struct {
	cfg Config

	mu       sync.Mutex
	ports    []*port // all that were found
	rails    []*rail // those that are used, open; nil until there are any
	vfs      *keeper
	closed   bool
	regions  map[*transfer.Region]*registration
	regionMu sync.RWMutex // guards regions; a leaf
	links    map[*link]struct{}
	linkMu   sync.Mutex // guards links; a leaf
}

var (
	_ transfer.Transport = (*transport)(nil)
	_ transfer.Registrar = (*transport)(nil)
	_ transfer.Porter    = (*transport)(nil)
	_ transfer.Waiter    = (*transport)(nil)
)

// Maker gives what makes the transport with these settings, for whoever decides later whether it is wanted.
func Maker(cfg Config) func() transfer.Transport {
	return func() transfer.Transport { return New(cfg) }
}

// New makes the transport. Devices are opened when it is first probed.
func New(cfg Config) transfer.Transport {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &transport{cfg: cfg, regions: make(map[*transfer.Region]*registration), links: make(map[*link]struct{})}
}

func (*transport) Name() string { return "rdma" }
func (*transport) Local() bool  { return false }

// Probe looks for ports that carry traffic. What it found stays open, also ports that do not at present.
func (t *transport) Probe() error {
	rails, err := t.open()
	if err != nil || slices.ContainsFunc(rails, func(r *rail) bool { return r.now().up }) {
		return err
	}
	var whys []string
	for _, r := range rails {
		whys = append(whys, r.found.name()+": "+r.now().why)
	}
	return errors.New("no RDMA port can be used: " + strings.Join(whys, "; "))
}

// Waits implements transfer.Waiter.
func (t *transport) Waits() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.rails) > 0
}

// open opens the devices once there are any.
func (t *transport) open() ([]*rail, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, net.ErrClosed
	}
	if t.rails == nil {
		if err := t.cfg.Validate(); err != nil {
			return nil, err
		}
		if err := t.takeVFs(); err != nil {
			return nil, err
		}
		d, err := discover(&t.cfg, kernelTree)
		t.ports = d.ports
		if err != nil {
			return nil, err
		}
		for _, r := range d.rails {
			if err := t.watch(r); err != nil {
				return nil, errors.Join(err, closeAll(d.rails))
			}
		}
		t.rails = d.rails
		for _, p := range d.ports {
			t.cfg.Logger.Info("RDMA port", "device", p.device, "port", p.number, "netdev", p.netdev, "used", p.used, "reason", p.reason)
		}
	}
	return t.rails, nil
}

// takeVFs makes the virtual functions that are asked for, once.
func (t *transport) takeVFs() error {
	if t.vfs != nil {
		return nil
	}
	k := newKeeper(&t.cfg)
	if err := k.take(&t.cfg); err != nil {
		return err
	}
	t.vfs = k
	t.cfg.taken = k.functions()
	return nil
}

// Ports implements transfer.Porter.
func (t *transport) Ports() []transfer.PortStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []transfer.PortStatus
	for _, p := range t.ports {
		now := *p
		if i := slices.IndexFunc(t.rails, func(r *rail) bool { return r.found == p }); i >= 0 {
			now = t.rails[i].now().port
			now.followed = true
		}
		list = append(list, now.status(kernelTree))
	}
	var spots []spot
	t.regionMu.RLock()
	for _, g := range t.regions {
		spots = append(spots, g.spot)
	}
	t.regionMu.RUnlock()
	rank(list, t.ports, spots, kernelTree)
	return list
}

// Close closes the devices. Links and regions are gone by then.
func (t *transport) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	var errs []error
	t.regionMu.Lock()
	for r, reg := range t.regions {
		errs = append(errs, reg.close())
		delete(t.regions, r)
	}
	t.regionMu.Unlock()
	errs = append(errs, closeAll(t.rails))
	t.rails = nil
	if t.vfs != nil { // when nothing of ours is open on them any more
		errs = append(errs, t.vfs.release())
		t.vfs = nil
	}
	return errors.Join(errs...)
}
