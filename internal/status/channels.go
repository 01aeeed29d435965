package status

import (
	"fmt"
	"io"
	"strings"
)

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

// Method is how a channel brings runs of a size to the network, or from it.
type Method struct {
	Direction string `json:"direction"`
	RunBytes  uint64 `json:"run_bytes"`
	Mode      string `json:"mode"`
	Why       string `json:"why"`
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
