package wire

import "errors"

// Message is one payload. Check says whether it can be sent; append writes it.
type Message interface {
	Type() Type
	Check() error
	append(b []byte) []byte
}

// Hello opens a connection. Its first 4 bytes keep their place in every version.
type Hello struct {
	VersionMin, VersionMax uint16
	SilenceMS              uint32 // the daemon ends the connection after so much silence of the engine; 0: never
	EngineID               string
}

// HelloOK accepts the engine and states the daemon's limits.
type HelloOK struct {
	Version     uint16
	PID         uint32
	Epoch       uint64
	MaxPayload  uint32
	MaxInflight uint32
	PingMS      uint32 // how often to ping
	SilenceMS   uint32 // silence after which to give the daemon up
	NodeID      string
	DataAddr    string
}

// RegisterRegion lends memory; the descriptor travels beside it. Layout is transfer.Layout's encoding.
type RegisterRegion struct {
	Size   uint64
	Flags  uint32
	Layout []byte
}

// RegisterDMABuf lends memory of a device; the dma-buf travels beside it. The region begins at Offset of it, and Address is
// where the engine's process has it. Device is the PCI address of whose memory it is, "" where that is not known.
type RegisterDMABuf struct {
	Size, Offset, Address uint64
	Flags                 uint32
	Layout                []byte
	Device                string
}

// RemoveRegion takes memory back. Answered when no lease touches it any more.
type RemoveRegion struct{ Region uint64 }

// Present is P's: the blocks of a request in the regions of a shard set, offered to the daemon that the ticket names.
type Present struct {
	Tokens  uint32
	Regions []uint64 // one a tensor-parallel rank, in order of rank; none: those of the engine's members
	Ticket  []byte
	Peer    string
	Meta    []byte
	Blocks  []uint32
}

// Extend appends blocks to those of Present.
type Extend struct {
	Lease  uint64
	Blocks []uint32
}

// Join makes the connection that of a rank of an engine: it lends memory and pushes.
type Join struct{ EngineID string }

// Describe is what an engine says of itself: a JSON object.
type Describe struct{ JSON []byte }

// Unit is Count blocks of one layer, or of all (transfer.AllLayers), from the request's block First on: in all regions of
// the lease where Shard is 0, else in the Shard-th only.
type Unit struct{ Layer, First, Count, Shard uint32 }

// Push says that units are complete in memory and may be sent.
type Push struct {
	Lease uint64
	Seq   uint64
	Units []Unit
}

// Handoff gives the record delivered at settling.
type Handoff struct {
	Lease  uint64
	Record []byte
}

// Bind is D's: where a presented request's KV shall land.
type Bind struct {
	FirstToken uint32
	Regions    []uint64 // one a tensor-parallel rank, in order of rank; none: those of the engine's members
	Ticket     []byte
	Blocks     []uint32
}

// Refuse is D's no to a ticket.
type Refuse struct {
	Ticket []byte
	Reason string
}

// Revoke ends a lease, named by id or, where Lease is 0, by its ticket's nonce. Answered when the local side is fenced.
type Revoke struct {
	Lease  uint64
	Nonce  [16]byte
	Reason string
}

// Ping asks for a Pong with the same value.
type Ping struct{ Value uint64 }

// Pong answers a Ping.
type Pong struct{ Value uint64 }

// Status asks for the daemon's status.
type Status struct{}

// SetupRing lends a ring; see package ring. Its memory and two doorbells, the daemon's and the engine's, travel beside it.
type SetupRing struct{ Submissions, Completions uint32 }

// StatusOK is the daemon's status, a JSON document.
type StatusOK struct{ JSON []byte }

// OK accepts a request. Value is the region or lease id it made, else 0.
type OK struct{ Value uint64 }

// Event is the payload of all events; fields that a kind does not use are zero.
type Event struct {
	Kind       Type
	Lease      uint64
	Nonce      [16]byte
	Seq        uint64 // PUSHED
	Tokens     uint32 // PRESENTED, BOUND
	FirstToken uint32 // BOUND
	Code       uint16 // ENDED, REFUSED: how the lease ended (4 revoked, 5 expired, 6 moved); GOODBYE: a Code
	Layouts    []byte // PRESENTED: the layouts of P's shard set, one after the other
	Text       string // PRESENTED: P's engine id; REFUSED, ENDED, GOODBYE: the reason
	Data       []byte // PRESENTED: P's meta; SETTLED: the hand-off record
}

func (Hello) Type() Type          { return TypeHello }
func (HelloOK) Type() Type        { return TypeHelloOK }
func (RegisterRegion) Type() Type { return TypeRegisterRegion }
func (RegisterDMABuf) Type() Type { return TypeRegisterDMABuf }
func (RemoveRegion) Type() Type   { return TypeRemoveRegion }
func (Present) Type() Type        { return TypePresent }
func (Extend) Type() Type         { return TypeExtend }
func (Join) Type() Type           { return TypeJoin }
func (Describe) Type() Type       { return TypeDescribe }
func (Push) Type() Type           { return TypePush }
func (Handoff) Type() Type        { return TypeHandoff }
func (Bind) Type() Type           { return TypeBind }
func (Refuse) Type() Type         { return TypeRefuse }
func (Revoke) Type() Type         { return TypeRevoke }
func (Ping) Type() Type           { return TypePing }
func (Pong) Type() Type           { return TypePong }
func (Status) Type() Type         { return TypeStatus }
func (SetupRing) Type() Type      { return TypeSetupRing }
func (StatusOK) Type() Type       { return TypeStatusOK }
func (OK) Type() Type             { return TypeOK }
func (*Error) Type() Type         { return TypeError }
func (e Event) Type() Type        { return e.Kind }

func (m Hello) Check() error {
	if m.EngineID == "" {
		return Errorf(CodeMalformed, "engine id is empty")
	}
	return checkLen("engine id", len(m.EngineID), MaxName)
}
func (m HelloOK) Check() error {
	return firstError(checkLen("node id", len(m.NodeID), MaxName), checkLen("data address", len(m.DataAddr), MaxName))
}
func (m RegisterRegion) Check() error { return checkLen("layout", len(m.Layout), MaxLayout) }
func (m RegisterDMABuf) Check() error {
	return errors.Join(checkLen("layout", len(m.Layout), MaxLayout), checkLen("device", len(m.Device), MaxName))
}
func (RemoveRegion) Check() error { return nil }
func (m Present) Check() error {
	return firstError(checkLen("region list", len(m.Regions), MaxRegions), checkLen("ticket", len(m.Ticket), MaxTicket), checkLen("peer address", len(m.Peer), MaxName),
		checkLen("meta", len(m.Meta), MaxMeta), checkLen("block list", len(m.Blocks), MaxBlocks))
}
func (m Extend) Check() error { return checkLen("block list", len(m.Blocks), MaxBlocks) }
func (m Join) Check() error {
	if m.EngineID == "" {
		return Errorf(CodeMalformed, "engine id is empty")
	}
	return checkLen("engine id", len(m.EngineID), MaxName)
}
func (m Describe) Check() error { return checkLen("description", len(m.JSON), MaxAbout) }
func (m Push) Check() error     { return checkLen("unit list", len(m.Units), MaxUnits) }
func (m Handoff) Check() error  { return checkLen("record", len(m.Record), MaxRecord) }
func (m Bind) Check() error {
	return firstError(checkLen("region list", len(m.Regions), MaxRegions), checkLen("ticket", len(m.Ticket), MaxTicket),
		checkLen("block list", len(m.Blocks), MaxBlocks))
}
func (m Refuse) Check() error {
	return firstError(checkLen("ticket", len(m.Ticket), MaxTicket), checkLen("reason", len(m.Reason), MaxText))
}
func (m Revoke) Check() error   { return checkLen("reason", len(m.Reason), MaxText) }
func (Ping) Check() error       { return nil }
func (Pong) Check() error       { return nil }
func (Status) Check() error     { return nil }
func (SetupRing) Check() error  { return nil }
func (m StatusOK) Check() error { return checkLen("status", len(m.JSON), MaxStatus) }
func (OK) Check() error         { return nil }
func (e *Error) Check() error   { return checkLen("text", len(e.Text), MaxText) }
func (e Event) Check() error {
	return firstError(checkLen("layouts", len(e.Layouts), MaxLayouts), checkLen("data", len(e.Data), MaxRecord),
		checkLen("text", len(e.Text), MaxText))
}

func (m Hello) append(b []byte) []byte {
	b = le.AppendUint16(b, m.VersionMin)
	b = le.AppendUint16(b, m.VersionMax)
	b = le.AppendUint32(b, m.SilenceMS)
	b = le.AppendUint16(b, uint16(len(m.EngineID)))
	b = append(b, 0, 0, 0, 0, 0, 0)
	return append(b, m.EngineID...)
}

func (m HelloOK) append(b []byte) []byte {
	b = le.AppendUint16(b, m.Version)
	b = append(b, 0, 0)
	b = le.AppendUint32(b, m.PID)
	b = le.AppendUint64(b, m.Epoch)
	b = le.AppendUint32(b, m.MaxPayload)
	b = le.AppendUint32(b, m.MaxInflight)
	b = le.AppendUint32(b, m.PingMS)
	b = le.AppendUint32(b, m.SilenceMS)
	b = le.AppendUint16(b, uint16(len(m.NodeID)))
	b = le.AppendUint16(b, uint16(len(m.DataAddr)))
	b = append(b, 0, 0, 0, 0)
	b = append(b, m.NodeID...)
	return append(b, m.DataAddr...)
}

func (m RegisterRegion) append(b []byte) []byte {
	b = le.AppendUint64(b, m.Size)
	b = le.AppendUint32(b, m.Flags)
	b = le.AppendUint32(b, uint32(len(m.Layout)))
	return append(b, m.Layout...)
}

func (m RegisterDMABuf) append(b []byte) []byte {
	b = le.AppendUint64(b, m.Size)
	b = le.AppendUint64(b, m.Offset)
	b = le.AppendUint64(b, m.Address)
	b = le.AppendUint32(b, m.Flags)
	b = le.AppendUint16(b, uint16(len(m.Layout)))
	b = le.AppendUint16(b, uint16(len(m.Device)))
	b = append(b, m.Layout...)
	return append(b, m.Device...)
}

func (m RemoveRegion) append(b []byte) []byte { return le.AppendUint64(b, m.Region) }

func (m Present) append(b []byte) []byte {
	b = le.AppendUint32(b, m.Tokens)
	b = le.AppendUint32(b, uint32(len(m.Blocks)))
	b = le.AppendUint32(b, uint32(len(m.Meta)))
	b = le.AppendUint16(b, uint16(len(m.Ticket)))
	b = le.AppendUint16(b, uint16(len(m.Peer)))
	b = le.AppendUint16(b, uint16(len(m.Regions)))
	b = append(b, 0, 0, 0, 0, 0, 0)
	b = appendU64s(b, m.Regions)
	b = appendU32s(b, m.Blocks)
	b = append(b, m.Ticket...)
	b = append(b, m.Peer...)
	return append(b, m.Meta...)
}

func (m Extend) append(b []byte) []byte {
	b = le.AppendUint64(b, m.Lease)
	b = le.AppendUint32(b, uint32(len(m.Blocks)))
	b = append(b, 0, 0, 0, 0)
	return appendU32s(b, m.Blocks)
}

func (m Join) append(b []byte) []byte {
	b = le.AppendUint16(b, uint16(len(m.EngineID)))
	b = append(b, 0, 0, 0, 0, 0, 0)
	return append(b, m.EngineID...)
}

func (m Describe) append(b []byte) []byte {
	b = le.AppendUint32(b, uint32(len(m.JSON)))
	b = append(b, 0, 0, 0, 0)
	return append(b, m.JSON...)
}

func (m Push) append(b []byte) []byte {
	b = le.AppendUint64(b, m.Lease)
	b = le.AppendUint64(b, m.Seq)
	b = le.AppendUint32(b, uint32(len(m.Units)))
	b = append(b, 0, 0, 0, 0)
	for _, u := range m.Units {
		b = le.AppendUint32(b, u.Layer)
		b = le.AppendUint32(b, u.First)
		b = le.AppendUint32(b, u.Count)
		b = le.AppendUint32(b, u.Shard)
	}
	return b
}

func (m Handoff) append(b []byte) []byte {
	b = le.AppendUint64(b, m.Lease)
	b = le.AppendUint32(b, uint32(len(m.Record)))
	b = append(b, 0, 0, 0, 0)
	return append(b, m.Record...)
}

func (m Bind) append(b []byte) []byte {
	b = le.AppendUint32(b, m.FirstToken)
	b = le.AppendUint32(b, uint32(len(m.Blocks)))
	b = le.AppendUint16(b, uint16(len(m.Ticket)))
	b = le.AppendUint16(b, uint16(len(m.Regions)))
	b = append(b, 0, 0, 0, 0)
	b = appendU64s(b, m.Regions)
	b = appendU32s(b, m.Blocks)
	return append(b, m.Ticket...)
}

func (m Refuse) append(b []byte) []byte {
	b = le.AppendUint16(b, uint16(len(m.Ticket)))
	b = le.AppendUint16(b, uint16(len(m.Reason)))
	b = append(b, 0, 0, 0, 0)
	b = append(b, m.Ticket...)
	return append(b, m.Reason...)
}

func (m Revoke) append(b []byte) []byte {
	b = le.AppendUint64(b, m.Lease)
	b = append(b, m.Nonce[:]...)
	b = le.AppendUint16(b, uint16(len(m.Reason)))
	b = append(b, 0, 0, 0, 0, 0, 0)
	return append(b, m.Reason...)
}

func (m Ping) append(b []byte) []byte { return le.AppendUint64(b, m.Value) }
func (m Pong) append(b []byte) []byte { return le.AppendUint64(b, m.Value) }
func (Status) append(b []byte) []byte { return b }
func (m OK) append(b []byte) []byte   { return le.AppendUint64(b, m.Value) }

func (m SetupRing) append(b []byte) []byte {
	b = le.AppendUint32(b, m.Submissions)
	b = le.AppendUint32(b, m.Completions)
	return append(b, 0, 0, 0, 0, 0, 0, 0, 0)
}

func (m StatusOK) append(b []byte) []byte {
	b = le.AppendUint32(b, uint32(len(m.JSON)))
	b = append(b, 0, 0, 0, 0)
	return append(b, m.JSON...)
}

func (e *Error) append(b []byte) []byte {
	b = le.AppendUint16(b, uint16(e.Code))
	b = le.AppendUint16(b, uint16(len(e.Text)))
	b = append(b, 0, 0, 0, 0)
	return append(b, e.Text...)
}

func (e Event) append(b []byte) []byte {
	b = le.AppendUint64(b, e.Lease)
	b = append(b, e.Nonce[:]...)
	b = le.AppendUint64(b, e.Seq)
	b = le.AppendUint32(b, e.Tokens)
	b = le.AppendUint32(b, e.FirstToken)
	b = le.AppendUint32(b, uint32(len(e.Layouts)))
	b = le.AppendUint32(b, uint32(len(e.Data)))
	b = le.AppendUint16(b, uint16(len(e.Text)))
	b = le.AppendUint16(b, e.Code)
	b = append(b, 0, 0, 0, 0)
	b = append(b, e.Layouts...)
	b = append(b, e.Text...)
	return append(b, e.Data...)
}
