package status

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

// Node is a listed node daemon.
type Node struct {
	registry.Node
	Status *NodeStatus `json:"status,omitempty"`
	Error  string      `json:"error,omitempty"`
}

// NodeStatus is what is shown of a node daemon's /status.
type NodeStatus struct {
	Engines  []Attached `json:"engines"`
	Leases   []Lease    `json:"leases"`
	Unusable []struct {
		Node   string `json:"node"`
		Reason string `json:"reason"`
	} `json:"peers_unusable,omitempty"`
	Channels   []Channel   `json:"channels"`
	Transports []Transport `json:"transports"`
	Telemetry  Telemetry   `json:"telemetry"`
}

// Lease is a living lease.
type Lease struct {
	Side       string    `json:"side"`
	State      string    `json:"state"`
	Engine     string    `json:"engine"`
	PeerNode   string    `json:"peer_node"`
	Tokens     uint32    `json:"tokens"`
	UnitsTotal uint64    `json:"pieces_wanted"`
	UnitsDone  uint64    `json:"pieces_done"`
	Deadline   time.Time `json:"deadline"`
}

func (n *Node) problem() string {
	if n.Error != "" || n.Status == nil {
		return n.Error
	}
	var why []string
	for _, p := range n.Status.Unusable {
		why = append(why, p.Reason)
	}
	return strings.Join(why, "; ")
}

func (r *Report) printNodes(t io.Writer) {
	fmt.Fprintf(t, "\nNODE\tHOST\tDATA\tENGINES\tLEASES\tPID\tUP\tSTATE\n")
	for _, n := range r.Nodes {
		engines, leases := "-", "-"
		if n.Status != nil {
			engines, leases = fmt.Sprint(n.Status.whole()), fmt.Sprint(len(n.Status.Leases))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", n.ID, n.Host, n.DataAddr, engines, leases, n.PID, since(n.Started), state(n.problem()))
	}
}

func (r *Report) printLeases(t io.Writer) {
	first := true
	for _, n := range r.Nodes {
		if n.Status == nil {
			continue
		}
		for _, l := range n.Status.Leases {
			if first {
				fmt.Fprintf(t, "\nLEASE OF\tENGINE\tSIDE\tPEER\tSTATE\tTOKENS\tPIECES\tENDS IN\n")
				first = false
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%d/%d\t%s\n", n.ID, l.Engine, l.Side, l.PeerNode, l.State, l.Tokens,
				l.UnitsDone, l.UnitsTotal, time.Until(l.Deadline).Round(time.Second))
		}
	}
}
