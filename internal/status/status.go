// Package status gathers what the parts say of themselves, from the registry and from each part's own pages, and
// writes it for people. It must not change anything, nor need a part to answer: one that does not is shown as such.
package status

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/sidecar"
)

const (
	// askTimeout bounds how long one part is waited for: a stopped one must not hold up the rest.
	askTimeout = 2 * time.Second
	// answerBytesMax bounds what a part may answer.
	answerBytesMax = 8 << 20
)

// Report is everything `headrace status` shows, and its --json document.
type Report struct {
	Etcd    []string `json:"etcd"`
	Routers []Router `json:"routers"`
	Workers []Worker `json:"workers"`
	Nodes   []Node   `json:"nodes"`
}

// Router is a listed router. Error says why its own page is missing.
type Router struct {
	registry.Router
	Status json.RawMessage `json:"status,omitempty"`
	Error  string          `json:"error,omitempty"`
}

// Worker is a listed worker.
type Worker struct {
	registry.Worker
	Status  *WorkerStatus `json:"status,omitempty"`  // of Headrace's own
	Figures *Figures      `json:"figures,omitempty"` // of engines of another kind
	Error   string        `json:"error,omitempty"`
	// Collected is what the router that looked last heard of it.
	Collected *Collected `json:"collected,omitempty"`
}

// Collected is what is shown of a worker in a router's /status.
type Collected struct {
	AgeMS   int64   `json:"age_ms"`
	Stale   bool    `json:"stale,omitempty"`
	Running int64   `json:"running"`
	Waiting int64   `json:"waiting"`
	KVUsage float64 `json:"kv_usage"` // 0 to 1, -1 where it is not said
	Problem string  `json:"problem,omitempty"`
	Events  []struct {
		State  string `json:"state"`
		Blocks int64  `json:"blocks"` // that the engine has, by its KV events
	} `json:"events,omitempty"`
}

// WorkerStatus is what is shown of a worker's /status.
type WorkerStatus struct {
	Running           int    `json:"running"`
	Waiting           int    `json:"waiting"`
	Node              string `json:"node"`
	NodeProblem       string `json:"node_problem,omitempty"` // why it has no daemon
	BlocksTotal       int    `json:"blocks_total"`
	BlocksFree        int    `json:"blocks_free"`
	BlocksCached      int    `json:"blocks_cached"`
	BlocksLeased      int    `json:"blocks_leased"`
	BlocksQuarantined int    `json:"blocks_quarantined"`
}

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

// Method is how a channel brings runs of a size to the network, or from it.
type Method struct {
	Direction string `json:"direction"`
	RunBytes  uint64 `json:"run_bytes"`
	Mode      string `json:"mode"`
	Why       string `json:"why"`
}

// Channel is a node daemon's end of a channel.
type Channel struct {
	PeerNode     string   `json:"peer_node"`
	PeerAddr     string   `json:"peer_addr"`
	Transport    string   `json:"transport"`
	Why          string   `json:"why"`
	Fencing      string   `json:"fencing"` // of leases there, by force; "" where the transport needs none
	Lanes        int      `json:"lanes"`
	LanesUp      int      `json:"lanes_up"`
	SentBps      float64  `json:"sent_bytes_per_s"`
	LandedBps    float64  `json:"landed_bytes_per_s"`
	SpeedBps     float64  `json:"speed_bytes_per_s"`
	Redialled    uint64   `json:"lanes_redialled"`
	Altered      uint64   `json:"pieces_altered"`
	Methods      []Method `json:"methods"`
	Carrier      string   `json:"carrier"`
	Fallbacks    uint64   `json:"fallbacks"`
	Rails        []Rail   `json:"rails"`
	BacklogBytes uint64   `json:"backlog_bytes"`
	RTTMicros    float64  `json:"rtt_us"`
	BytesSent    uint64   `json:"bytes_sent"`
	BytesLanded  uint64   `json:"bytes_landed"`
	Wire         Wire     `json:"wire"`
	Errors       uint64   `json:"errors"`
	LastError    string   `json:"last_error,omitempty"`
}

// Wire is what the kernel or the devices say of a channel.
type Wire struct {
	Source               string  `json:"source"`
	Why                  string  `json:"why"`
	SentBytes            uint64  `json:"sent_bytes"`
	ReceivedBytes        uint64  `json:"received_bytes"`
	SentPackets          uint64  `json:"sent_packets"`
	ReceivedPackets      uint64  `json:"received_packets"`
	RetransmittedBytes   uint64  `json:"retransmitted_bytes"`
	RetransmittedPackets uint64  `json:"retransmitted_packets"`
	RTTMicros            float64 `json:"rtt_us"`
	OfWholeRails         bool    `json:"of_whole_rails,omitempty"`
}

// Telemetry says how a daemon measures its lanes from outside.
type Telemetry struct {
	Mode    string `json:"mode"`
	Sources []struct {
		Of     string `json:"of"`
		Source string `json:"source"`
		Why    string `json:"why"`
	} `json:"sources"`
	Rails []struct {
		Device   string  `json:"device"`
		Port     int     `json:"port"`
		Source   string  `json:"source"`
		Why      string  `json:"why"`
		Sent     Packets `json:"sent"`
		Received Packets `json:"received"`
	} `json:"rails"`
	Posts struct {
		Count      uint64  `json:"count"`
		MeanMicros float64 `json:"mean_us"`
		P50Micros  float64 `json:"p50_us"`
		P99Micros  float64 `json:"p99_us"`
	} `json:"posts"`
}

// Packets are a direction's.
type Packets struct {
	Packets              uint64 `json:"packets"`
	DataBytes            uint64 `json:"data_bytes"`
	RetransmittedPackets uint64 `json:"retransmitted_packets"`
}

// Rail is a port of a network card at either end of a channel, or TCP beside it.
type Rail struct {
	Name        string  `json:"name"`
	Peer        string  `json:"peer,omitempty"`
	Transport   string  `json:"transport"`
	State       string  `json:"state"`
	Why         string  `json:"why"`
	Lanes       int     `json:"lanes"`
	LanesUp     int     `json:"lanes_up"`
	LanesFailed uint64  `json:"lanes_failed"`
	BytesSent   uint64  `json:"bytes_sent"`
	BytesLanded uint64  `json:"bytes_landed"`
	Share       float64 `json:"share"`
	PieceMicros float64 `json:"piece_us"`
	SpeedBps    float64 `json:"speed_bytes_per_s"`
}

// Gather asks every listed part at once.
func Gather(ctx context.Context, endpoints []string, view *registry.View) *Report {
	r := &Report{
		Etcd: endpoints, Routers: make([]Router, len(view.Routers)),
		Workers: make([]Worker, len(view.Workers)), Nodes: make([]Node, len(view.Nodes)),
	}
	client := &http.Client{Timeout: askTimeout, Transport: &http.Transport{DisableKeepAlives: true}}
	var wg sync.WaitGroup
	for i, n := range view.Nodes {
		wg.Go(func() {
			r.Nodes[i].Node = n
			r.Nodes[i].Status, r.Nodes[i].Error = ask[*NodeStatus](ctx, client, n.Admin)
		})
	}
	for i, w := range view.Workers {
		wg.Go(func() {
			r.Workers[i].Worker = w
			if foreign(&w) {
				r.Workers[i].Figures, r.Workers[i].Error = askEngine(ctx, client, w.Addr)
				return
			}
			r.Workers[i].Status, r.Workers[i].Error = ask[*WorkerStatus](ctx, client, w.Addr)
		})
	}
	for i, x := range view.Routers {
		wg.Go(func() {
			r.Routers[i].Router = x
			r.Routers[i].Status, r.Routers[i].Error = ask[json.RawMessage](ctx, client, x.Admin)
		})
	}
	wg.Wait()
	r.spread()
	return r
}

// spread gives each worker what the router that looked last heard of it.
func (r *Report) spread() {
	best := map[string]*Collected{}
	for _, x := range r.Routers {
		var s struct {
			Workers []struct {
				ID     string     `json:"id"`
				Engine *Collected `json:"engine"`
			} `json:"workers"`
		}
		if json.Unmarshal(x.Status, &s) != nil {
			continue // it is shown as it came
		}
		for _, w := range s.Workers {
			if old := best[w.ID]; w.Engine != nil && (old == nil || old.Stale && !w.Engine.Stale || old.Stale == w.Engine.Stale && w.Engine.AgeMS < old.AgeMS) {
				best[w.ID] = w.Engine
			}
		}
	}
	for i := range r.Workers {
		r.Workers[i].Collected = best[r.Workers[i].ID]
	}
}

// ask reads a part's /status.
func ask[T any](ctx context.Context, client *http.Client, addr string) (v T, problem string) {
	if addr == "" {
		return v, "it has no admin address"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/status", nil)
	if err != nil {
		return v, err.Error()
	}
	resp, err := client.Do(req)
	if err != nil {
		return v, err.Error()
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return v, "GET /status: " + resp.Status
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, answerBytesMax)).Decode(&v); err != nil {
		return v, "read /status: " + err.Error()
	}
	return v, ""
}

// Print writes the report: tables, or with asJSON the document.
func (r *Report) Print(w io.Writer, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	r.printRouters(t)
	r.printWorkers(t)
	r.printEngines(t)
	r.printNodes(t)
	r.printChannels(t)
	r.printRails(t)
	r.printPorts(t)
	r.printWire(t)
	r.printLeases(t)
	return t.Flush()
}

// problem is what to show as a part's state.
func (w *Worker) problem() string {
	switch {
	case w.Error == "" && w.Status != nil:
		return w.Status.NodeProblem
	case w.Error == "" && w.Dialect == sidecar.DialectVLLM && w.NodeData == "":
		return "its connector is not with a node daemon: it serves whole requests only"
	}
	return w.Error
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

func (r *Report) printRouters(t io.Writer) {
	fmt.Fprintf(t, "ROUTER\tENDPOINT\tPID\tUP\tSTATE\n")
	for _, x := range r.Routers {
		fmt.Fprintf(t, "%s\thttp://%s/v1\t%d\t%s\t%s\n", x.ID, x.Addr, x.PID, since(x.Started), state(x.Error))
	}
}

func (r *Report) printWorkers(t io.Writer) {
	fmt.Fprintf(t, "\nWORKER\tROLE\tMODEL\tNODE\tBLOCKS USED/FREE/LEASED/OF\tRUNNING\tWAITING\tKV\tPID\tUP\tSTATE\n")
	for _, w := range r.Workers {
		blocks, running, waiting, usage := "-", "-", "-", "-"
		if c := w.Collected; c != nil && !c.Stale {
			running, waiting = fmt.Sprint(c.Running), fmt.Sprint(c.Waiting)
			if c.KVUsage >= 0 {
				usage = fmt.Sprintf("%.0f %%", 100*c.KVUsage)
			}
		}
		if s := w.Status; s != nil {
			blocks = fmt.Sprintf("%d/%d/%d/%d", s.BlocksTotal-s.BlocksFree, s.BlocksFree, s.BlocksLeased, s.BlocksTotal)
			running, waiting = fmt.Sprint(s.Running), fmt.Sprint(s.Waiting)
		}
		if f := w.Figures; f != nil {
			blocks, running, waiting = f.blocks(w.Blocks), count(f.Running), count(f.Waiting)
			if f.CacheUsage != nil {
				usage = fmt.Sprintf("%.0f %%", 100**f.CacheUsage)
			}
		}
		node := w.NodeID
		if node == "" {
			node = "none"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n",
			w.ID, w.Role, w.Model, node, blocks, running, waiting, usage, w.PID, since(w.Started), state(w.problem())+w.share())
	}
}

// share says how much of the traffic the worker is to get, if that is not all.
func (w *Worker) share() string {
	switch {
	case w.Weight == nil || *w.Weight == 1:
		return ""
	case *w.Weight == 0:
		return ", drains"
	}
	return fmt.Sprintf(", weight %.3g", *w.Weight)
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

func (r *Report) printChannels(t io.Writer) {
	fmt.Fprintf(t, "\nCHANNEL\tTRANSPORT\tLANES\tSENT/s\tLANDED/s\tSPEED/s\tBACKLOG\tRTT\tERRORS\tALTERED\tMETHOD\tWHY\n")
	for _, n := range r.Nodes {
		if n.Status == nil {
			continue
		}
		for _, c := range n.Status.Channels {
			fmt.Fprintf(t, "%s -> %s\t%s\t%d/%d\t%s\t%s\t%s\t%s\t%.0f us\t%d\t%d\t%s\t%s\n", n.ID, c.PeerNode, c.Transport, c.LanesUp, c.Lanes,
				humanBytes(c.SentBps), humanBytes(c.LandedBps), humanBytes(c.SpeedBps), humanBytes(float64(c.BacklogBytes)), c.RTTMicros, c.Errors, c.Altered, c.method(), c.reasons())
		}
	}
}

// printWire shows what was measured from outside, by whom and why by those.
func (r *Report) printWire(t io.Writer) {
	first := true
	row := func(format string, args ...any) {
		if first {
			fmt.Fprintf(t, "\nON THE WIRE\tBY\tSENT\tRECEIVED\tPACKETS OUT/IN\tSENT AGAIN\tRTT\tWHY\n")
			first = false
		}
		fmt.Fprintf(t, format, args...)
	}
	for _, n := range r.Nodes {
		if n.Status == nil {
			continue
		}
		for _, c := range n.Status.Channels {
			if w := c.Wire; w.Source != "" && w.Source != "none" {
				row("%s -> %s\t%s\t%s\t%s\t%d/%d\t%d (%s)\t%.0f us\t%s\n", n.ID, c.PeerNode, w.Source, humanBytes(float64(w.SentBytes)), humanBytes(float64(w.ReceivedBytes)),
					w.SentPackets, w.ReceivedPackets, w.RetransmittedPackets, humanBytes(float64(w.RetransmittedBytes)), w.RTTMicros, w.Why)
			}
		}
		for _, x := range n.Status.Telemetry.Rails {
			row("%s: %s/%d\t%s\t%s\t%s\t%d/%d\t%d\t-\t%s\n", n.ID, x.Device, x.Port, x.Source, humanBytes(float64(x.Sent.DataBytes)), humanBytes(float64(x.Received.DataBytes)),
				x.Sent.Packets, x.Received.Packets, x.Sent.RetransmittedPackets, x.Why)
		}
		if p := n.Status.Telemetry.Posts; p.Count > 0 {
			row("%s: posts\tebpf\t-\t-\t-\t-\t%.0f us\t%d from post to completion, half of them within %.0f us, 99 %% within %.0f us\n", n.ID, p.MeanMicros, p.Count, p.P50Micros, p.P99Micros)
		}
	}
}

// reasons says why the channel is over its transport, and how it fences by force where it has to.
func (c *Channel) reasons() string {
	if c.Fencing == "" {
		return c.Why
	}
	return c.Why + "; fences " + c.Fencing
}

// method puts a channel's methods in a few words. The reasons are in the JSON document.
func (c *Channel) method() string {
	if c.Transport == "shm" {
		return "copy"
	}
	if len(c.Methods) == 0 {
		return "direct"
	}
	var b strings.Builder
	for i, m := range c.Methods {
		switch {
		case i == 0:
			b.WriteString(m.Direction)
		case c.Methods[i-1].Direction != m.Direction:
			b.WriteString("; " + m.Direction)
		default:
			b.WriteString(",")
		}
		b.WriteString(" " + m.Mode)
		if m.RunBytes > 0 {
			fmt.Fprintf(&b, " (runs to %s)", humanBytes(float64(m.RunBytes)))
		}
	}
	return b.String()
}

// printRails is for channels over more than one rail.
func (r *Report) printRails(t io.Writer) {
	first := true
	for _, n := range r.Nodes {
		if n.Status == nil {
			continue
		}
		for _, c := range n.Status.Channels {
			if len(c.Rails) < 2 {
				continue
			}
			if first {
				fmt.Fprintf(t, "\nRAIL OF CHANNEL\tRAIL\tPEER'S\tSTATE\tLANES\tFAILED\tSHARE\tSENT\tSPEED/s\tPIECE\tWHY\n")
				first = false
			}
			for _, x := range c.Rails {
				peer := x.Peer
				if peer == "" {
					peer = "-"
				}
				fmt.Fprintf(t, "%s -> %s\t%s\t%s\t%s\t%d/%d\t%d\t%.0f %%\t%s\t%s\t%.0f us\t%s\n", n.ID, c.PeerNode, x.Name, peer, x.State, x.LanesUp, x.Lanes,
					x.LanesFailed, 100*x.Share, humanBytes(float64(x.BytesSent)), humanBytes(x.SpeedBps), x.PieceMicros, x.Why)
			}
		}
	}
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

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func numberOrDash(n int, known bool) string {
	if !known {
		return "-"
	}
	return fmt.Sprint(n)
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

func since(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return time.Since(t).Round(time.Second).String()
}

func state(problem string) string {
	if problem == "" {
		return "ok"
	}
	return problem
}

// humanBytes writes a number of bytes for people.
func humanBytes(v float64) string {
	for _, u := range []struct {
		limit float64
		name  string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if v >= u.limit {
			return fmt.Sprintf("%.1f %s", v/u.limit, u.name)
		}
	}
	return fmt.Sprintf("%.0f B", v)
}
