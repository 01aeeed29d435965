package transfer

import (
	"encoding/json"
	"time"
)

// Status is a snapshot of an engine for people and programs. It copies everything: holding it holds nothing.
type Status struct {
	NodeID       string            `json:"node_id"`
	Epoch        uint64            `json:"epoch"`
	DataAddr     string            `json:"data_addr"`
	RateLimitBps int64             `json:"rate_limit_bytes_per_s"` // 0: none
	Checksum     string            `json:"checksum"`               // of pieces this daemon sends: off, always or 1/N
	Transports   []TransportStatus `json:"transports"`
	Engines      []ClientStatus    `json:"engines"`
	Leases       []LeaseStatus     `json:"leases"`
	Channels     []ChannelStatus   `json:"channels"`
	Totals       Totals            `json:"totals"`
	Unusable     []PeerRefusal     `json:"peers_unusable,omitempty"` // without a protocol version in common, or out of reach
	Tickets      int               `json:"tickets_remembered"`
	Waiting      int               `json:"tickets_waiting"` // presented here to engines that are not attached
	Draining     bool              `json:"draining"`        // it gives way to a successor
}

// PeerRefusal is a peer to which no channel could be opened when that was last tried.
type PeerRefusal struct {
	Node   string    `json:"node"`
	Reason string    `json:"reason"` // and what to do
	Since  time.Time `json:"since"`
	Tries  int       `json:"tries,omitempty"`
}

// Totals count since the engine started.
type Totals struct {
	BytesSent        uint64 `json:"bytes_sent"`   // payload of pieces posted and completed
	BytesLanded      uint64 `json:"bytes_landed"` // payload counted as landed, once each
	PiecesDuplicate  uint64 `json:"pieces_duplicate"`
	PiecesVerified   uint64 `json:"pieces_verified"`  // against their checksum
	PiecesAltered    uint64 `json:"pieces_altered"`   // arrived with another checksum than they were sent with
	PiecesResent     uint64 `json:"pieces_resent"`    // because they arrived altered at a peer
	PiecesDiscarded  uint64 `json:"pieces_discarded"` // arrived for a lease that had ended, or aborted by the sender
	LeasesPresented  uint64 `json:"leases_presented"`
	LeasesSettled    uint64 `json:"leases_settled"`
	LeasesRevoked    uint64 `json:"leases_revoked"`
	LeasesExpired    uint64 `json:"leases_expired"`
	LeasesMoved      uint64 `json:"leases_moved"`    // given back unpresented, for the successor of this daemon
	PresentedAgain   uint64 `json:"presented_again"` // to the successor of a peer
	VersionRefusals  uint64 `json:"version_refusals"`
	TicketsRefused   uint64 `json:"tickets_refused"`
	TicketsRecalled  uint64 `json:"tickets_recalled"` // asked for by who holds the cluster key
	ChannelsOpened   uint64 `json:"channels_opened"`
	ChannelsDied     uint64 `json:"channels_died"`
	HandshakesFailed uint64 `json:"handshakes_failed"`
	FencesForced     uint64 `json:"fences_forced"`
	LeasesUngranted  uint64 `json:"leases_ungranted"` // bound without a right to write of their own where the transport has such
}

// TransportStatus says what this host can use, and why not.
type TransportStatus struct {
	Name   string       `json:"name"`
	Usable bool         `json:"usable"`
	Reason string       `json:"reason,omitempty"`
	Ports  []PortStatus `json:"ports,omitempty"` // of RDMA devices
}

// PortStatus is one port of an RDMA device.
type PortStatus struct {
	Device           string `json:"device"`
	Port             int    `json:"port"`
	Netdev           string `json:"netdev,omitempty"`
	PCI              string `json:"pci,omitempty"`
	NUMANode         int    `json:"numa_node"` // -1: the host does not say
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
	PhysicalFunction string `json:"physical_function,omitempty"` // whose virtual function it is
	VirtualFunction  int    `json:"virtual_function"`            // its number, -1: it is none
	VFs              int    `json:"vfs"`                         // that it has
	VFsMax           int    `json:"vfs_max"`                     // that it can have, 0: no SR-IOV
	Used             bool   `json:"used"`
	Rank             int    `json:"rank,omitempty"` // among those used: by rate, and nearness to the engines' memory
	Reason           string `json:"reason"`
}

// ClientStatus is one attached engine.
type ClientStatus struct {
	EngineID string         `json:"engine_id"`
	MemberOf string         `json:"member_of,omitempty"` // the engine whose rank it is; it has no leases of its own
	Leases   int            `json:"leases"`
	Regions  []RegionStatus `json:"regions"`
	// About is what the engine says of itself. It is filled in by the node daemon.
	About json.RawMessage `json:"about,omitempty"`
	// Submission is filled in by the node daemon: how the engine's work came in.
	Submission SubmissionStatus `json:"submission"`
}

// SubmissionStatus counts how an engine's pushes reached its daemon, and what told the two of work.
type SubmissionStatus struct {
	RingPushes          uint64 `json:"ring_pushes"`
	MessagePushes       uint64 `json:"message_pushes"`
	RefusedPushes       uint64 `json:"refused_ring_pushes"`
	OverflowCompletions uint64 `json:"overflow_completions"` // went as messages because the ring was full
	Doorbells           uint64 `json:"doorbells"`            // rung at the engine
	Wakeups             uint64 `json:"wakeups"`              // of the daemon, by its doorbell
	Spins               uint64 `json:"spins"`                // work that was found without a doorbell
}

// RegionStatus is one lent region.
type RegionStatus struct {
	ID     RegionID `json:"id"`
	Bytes  uint64   `json:"bytes"`
	Blocks uint32   `json:"blocks"`
	Layers uint32   `json:"layers"`
	Kind   string   `json:"kind"`                 // memory, or device memory
	Page   uint64   `json:"page_bytes,omitempty"` // of memory that is mapped
	Reason string   `json:"reason,omitempty"`     // what cannot be done with it, and why
}

// LeaseStatus is one living lease.
type LeaseStatus struct {
	ID          LeaseID   `json:"id"`
	Side        string    `json:"side"` // source or target
	State       string    `json:"state"`
	Engine      string    `json:"engine"`
	PeerNode    string    `json:"peer_node"`
	Tokens      uint32    `json:"tokens"`
	RegionPairs int       `json:"region_pairs"` // between P's shard set and D's, once bound
	UnitsWanted uint64    `json:"pieces_wanted"`
	UnitsDone   uint64    `json:"pieces_done"`
	Deadline    time.Time `json:"deadline"`
}

// RailStatus is what a channel's end has over one rail: a port of a network card at either end, or TCP.
type RailStatus struct {
	Key         string  `json:"-"` // tells it from the channel's other rails
	Name        string  `json:"name"`
	Peer        string  `json:"peer,omitempty"` // the other end's port
	Transport   string  `json:"transport"`
	State       string  `json:"state"` // up, down, or spare: up, and used when nothing else is
	Why         string  `json:"why"`   // the two ports were paired; or the rail is down
	Lanes       int     `json:"lanes"` // there should be
	LanesUp     int     `json:"lanes_up"`
	LanesFailed uint64  `json:"lanes_failed"`
	BytesSent   uint64  `json:"bytes_sent"`
	BytesLanded uint64  `json:"bytes_landed"`
	Share       float64 `json:"share"`             // of all that this end sent
	PieceMicros float64 `json:"piece_us"`          // from posting to completion, the mean
	SpeedBps    float64 `json:"speed_bytes_per_s"` // of its lanes together, while they have something to send
}

// ChannelStatus is one channel's end.
type ChannelStatus struct {
	PeerNode     string         `json:"peer_node"`
	PeerAddr     string         `json:"peer_addr"`
	PeerEpoch    uint64         `json:"peer_epoch"`
	Leaving      bool           `json:"leaving,omitempty"` // the peer gives way to its successor
	Dialled      bool           `json:"dialled"`
	Transport    string         `json:"transport"`
	Why          string         `json:"why"`               // the transport was chosen
	Fencing      string         `json:"fencing,omitempty"` // of leases bound at this end, by force, where the peer writes by itself
	Lanes        int            `json:"lanes"`
	LanesUp      int            `json:"lanes_up"`
	Redialled    uint64         `json:"lanes_redialled"` // by this end, in place of failed ones
	Since        time.Time      `json:"since"`
	SentBps      float64        `json:"sent_bytes_per_s"` // exponentially weighted, over about two seconds
	LandedBps    float64        `json:"landed_bytes_per_s"`
	SpeedBps     float64        `json:"speed_bytes_per_s"` // of sending while there was something to send; 0: not measured
	BacklogBytes uint64         `json:"backlog_bytes"`     // pushed and not yet landed
	RTTMicros    float64        `json:"rtt_us"`
	BytesSent    uint64         `json:"bytes_sent"`
	BytesLanded  uint64         `json:"bytes_landed"`
	Altered      uint64         `json:"pieces_altered"` // arrived so on this end
	Methods      []MethodStatus `json:"methods"`        // for each size of runs that was met: direct or staged, and why
	Carrier      string         `json:"carrier"`        // the transport that carries at present: another one where the first has no lane up
	Fallbacks    uint64         `json:"fallbacks"`      // how often that had to be another one
	Rails        []RailStatus   `json:"rails"`
	Wire         Wire           `json:"wire"` // as seen from outside: by the kernel or the devices
	Errors       uint64         `json:"errors"`
	LastError    string         `json:"last_error,omitempty"`
}
