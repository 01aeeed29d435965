package status

import (
	"fmt"
	"io"
)

// Transport is a way to move bytes that a node daemon has, or has not.
type Transport struct {
	Name   string `json:"name"`
	Usable bool   `json:"usable"`
	Reason string `json:"reason,omitempty"`
	Ports  []Port `json:"ports,omitempty"`
}

// Port is a port of an RDMA device of a node daemon's host.
type Port struct {
	Device           string `json:"device"`
	Port             int    `json:"port"`
	Netdev           string `json:"netdev,omitempty"`
	PCI              string `json:"pci,omitempty"`
	NUMANode         int    `json:"numa_node"`
	LinkLayer        string `json:"link_layer,omitempty"`
	State            string `json:"state,omitempty"`
	RateMbps         uint64 `json:"rate_mbps,omitempty"`
	MTU              uint32 `json:"mtu,omitempty"`
	LID              uint32 `json:"lid,omitempty"`
	GID              string `json:"gid,omitempty"`
	GIDIndex         int    `json:"gid_index"`
	GIDType          string `json:"gid_type,omitempty"`
	PKey             string `json:"p_key,omitempty"`
	PKeyIndex        int    `json:"p_key_index"`
	PhysicalFunction string `json:"physical_function,omitempty"`
	VirtualFunction  int    `json:"virtual_function"`
	VFs              int    `json:"vfs"`
	VFsMax           int    `json:"vfs_max"`
	Used             bool   `json:"used"`
	Rank             int    `json:"rank,omitempty"`
	Reason           string `json:"reason"`
}

// printPorts is for hosts with RDMA devices only.
func (r *Report) printPorts(t io.Writer) {
	first := true
	for _, n := range r.Nodes {
		if n.Status == nil {
			continue
		}
		for _, x := range n.Status.Transports {
			for _, p := range x.Ports {
				if first {
					fmt.Fprintf(t, "\nRDMA PORT OF\tDEVICE\tNETDEV\tPCI\tNUMA\tFUNCTION\tSTATE\tRATE\tMTU\tADDRESS\tUSED\tWHY\n")
					first = false
				}
				fmt.Fprintf(t, "%s\t%s:%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", n.ID, p.Device, p.Port, orDash(p.Netdev), orDash(p.PCI), numberOrDash(p.NUMANode, p.NUMANode >= 0),
					p.function(), orDash(p.State), p.rate(), numberOrDash(int(p.MTU), p.MTU > 0), p.address(), p.use(), orDash(p.Reason))
			}
		}
	}
}

func (p *Port) function() string {
	switch {
	case p.PhysicalFunction != "":
		return fmt.Sprintf("VF %d of %s", p.VirtualFunction, p.PhysicalFunction)
	case p.VFsMax > 0:
		return fmt.Sprintf("PF, %d/%d VFs", p.VFs, p.VFsMax)
	}
	return "-"
}

func (p *Port) rate() string {
	if p.RateMbps == 0 {
		return "-"
	}
	return fmt.Sprintf("%g Gb/s", float64(p.RateMbps)/1e3)
}

func (p *Port) address() string {
	if p.GID == "" {
		return "-"
	}
	return fmt.Sprintf("%s (%s, index %d)", p.GID, p.GIDType, p.GIDIndex)
}

func (p *Port) use() string {
	switch {
	case p.Used && p.Rank > 0:
		return fmt.Sprintf("yes, rank %d", p.Rank)
	case p.Used:
		return "yes"
	}
	return "no"
}
