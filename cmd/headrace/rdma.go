package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/rdma"
)

// rdmaFlags are the settings of the RDMA transport, the same on node and up.
type rdmaFlags struct {
	cfg         rdma.Config
	gidIndex    string
	pkey        string
	vfs         []string
	vfAddresses []string
}

const rdmaPrefix = "rdma-"

func (r *rdmaFlags) add(fs *pflag.FlagSet) {
	c := &r.cfg
	fs.StringSliceVar(&c.Devices, "rdma-devices", nil, "RDMA `ports` to use: mlx5_0, mlx5_0:2 for its second port, eth0 or 0000:3b:00.0 (default: all that are active, less those slower by far)")
	fs.StringVar(&r.gidIndex, "rdma-gid-index", "auto", "which of a port's addresses to use: auto (on Ethernet RoCE v2, IPv4 first) or an `index` of its GID table")
	fs.IntVar(&c.PKeyIndex, "rdma-pkey-index", 0, "`index` of the partition key in the ports' tables")
	fs.StringVar(&r.pkey, "rdma-pkey", "", "partition key by its `value`, as 0x8001, in place of its index: looked for in each port's table")
	fs.IntVar(&c.ServiceLevel, "rdma-service-level", 0, "service level of RDMA packets, 0 to 15; on Ethernet the VLAN priority")
	fs.IntVar(&c.AckTimeout, "rdma-ack-timeout", 0, "wait for acknowledgements 4.096 us * 2^`n`, eight times (1 to 31; 0: 14, which is 67 ms)")
	fs.IntVar(&c.TrafficClass, "rdma-traffic-class", 0, "traffic class of RDMA packets, 0 to 255: four times their DSCP")
	fs.StringVar(&c.Op, "rdma-op", rdma.OpWrite, "how KV is sent over RDMA: write, or read, which has the other end's daemon fetch it")
	fs.DurationVar(&c.Spin, "rdma-spin", 0, "how `long` to look for RDMA completions before sleeping; it takes a processor and saves a wake-up")
	fs.StringSliceVar(&r.vfs, "rdma-vfs", nil, "SR-IOV virtual functions to make, to use in the physical ones' place and to put back at the end: `N` of each, or of some, as eth0=2; needs root")
	fs.IntVar(&c.VFMTU, "rdma-vf-mtu", 0, "MTU of the virtual functions' network interfaces (default: as they come)")
	fs.StringSliceVar(&r.vfAddresses, "rdma-vf-addresses", nil, "`addresses` for them in their order, as 10.1.0.5/24,10.1.0.6/24 (default: whatever configures networks here)")
}

// config gives the settings, checked.
func (r *rdmaFlags) config() (rdma.Config, error) {
	c := r.cfg
	if r.gidIndex != "auto" && r.gidIndex != "" {
		n, err := strconv.Atoi(r.gidIndex)
		if err != nil {
			return c, config.Misused(fmt.Errorf("--rdma-gid-index %q: use auto, or an index of the port's GID table", r.gidIndex))
		}
		c.GIDIndex = &n
	}
	if r.pkey != "" {
		n, err := strconv.ParseUint(r.pkey, 0, 16)
		if err != nil || n == 0 {
			return c, config.Misused(fmt.Errorf("--rdma-pkey %q: use a partition key as 0x8001", r.pkey))
		}
		c.PKey = uint16(n)
	}
	var err error
	if c.VFs, err = rdma.ParseVFs(r.vfs); err != nil {
		return c, config.Misused(fmt.Errorf("--rdma-vfs: %w", err))
	}
	if c.VFAddresses, err = rdma.ParseAddresses(r.vfAddresses); err != nil {
		return c, config.Misused(fmt.Errorf("--rdma-vf-addresses: %w", err))
	}
	if err := c.Validate(); err != nil {
		return c, config.Misused(fmt.Errorf("--rdma settings: %w", err))
	}
	return c, nil
}

// rdmaArgs are the flags of the kind that were set, for a child to be started with.
func rdmaArgs(fs *pflag.FlagSet) (args []string) {
	fs.VisitAll(func(f *pflag.Flag) {
		if !f.Changed || !strings.HasPrefix(f.Name, rdmaPrefix) {
			return
		}
		value := f.Value.String()
		if list, ok := f.Value.(pflag.SliceValue); ok {
			value = strings.Join(list.GetSlice(), ",")
		}
		args = append(args, "--"+f.Name+"="+value)
	})
	return args
}
