package wire

import "fmt"

// Parse reads a payload. It accepts exactly what append writes: a payload that parses is
// byte for byte what encoding the result yields.
func Parse(t Type, p []byte) (Message, error) {
	parse, ok := parsers[t]
	if !ok && !t.IsEvent() {
		return nil, Errorf(CodeUnknownType, "%s is not a message of this protocol", t)
	}
	d := &decoder{b: p}
	var m Message
	if t.IsEvent() {
		m = parseEvent(t, d)
	} else {
		m = parse(d)
	}
	if err := d.end(); err != nil {
		return nil, &Error{Code: CodeMalformed, Text: Cut(fmt.Sprintf("parse %s: %v", t, err))}
	}
	return m, nil
}

var parsers = map[Type]func(*decoder) Message{
	TypeHello: func(d *decoder) Message {
		m := Hello{VersionMin: d.u16(), VersionMax: d.u16(), SilenceMS: d.u32()}
		n := d.size("engine id", uint32(d.u16()), MaxName)
		d.zero16()
		d.zero32()
		if d.err == nil && n == 0 {
			d.fail("engine id is empty")
		}
		m.EngineID = d.text(n)
		return m
	},
	TypeHelloOK: func(d *decoder) Message {
		m := HelloOK{Version: d.u16()}
		d.zero16()
		m.PID, m.Epoch = d.u32(), d.u64()
		m.MaxPayload, m.MaxInflight, m.PingMS, m.SilenceMS = d.u32(), d.u32(), d.u32(), d.u32()
		node := d.size("node id", uint32(d.u16()), MaxName)
		addr := d.size("data address", uint32(d.u16()), MaxName)
		d.zero32()
		m.NodeID, m.DataAddr = d.text(node), d.text(addr)
		return m
	},
	TypeRegisterRegion: func(d *decoder) Message {
		m := RegisterRegion{Size: d.u64(), Flags: d.u32()}
		m.Layout = d.bytes(d.size("layout", d.u32(), MaxLayout))
		return m
	},
	TypeRegisterDMABuf: func(d *decoder) Message {
		m := RegisterDMABuf{Size: d.u64(), Offset: d.u64(), Address: d.u64(), Flags: d.u32()}
		layout := d.size("layout", uint32(d.u16()), MaxLayout)
		device := d.size("device", uint32(d.u16()), MaxName)
		m.Layout, m.Device = d.bytes(layout), d.text(device)
		return m
	},
	TypeRemoveRegion: func(d *decoder) Message { return RemoveRegion{Region: d.u64()} },
	TypePresent:      parsePresent,
	TypeExtend: func(d *decoder) Message {
		m := Extend{Lease: d.u64()}
		blocks := d.size("block list", d.u32(), MaxBlocks)
		d.zero32()
		m.Blocks = d.u32s(blocks)
		return m
	},
	TypeJoin: func(d *decoder) Message {
		n := d.size("engine id", uint32(d.u16()), MaxName)
		d.zero16()
		d.zero32()
		if d.err == nil && n == 0 {
			d.fail("engine id is empty")
		}
		return Join{EngineID: d.text(n)}
	},
	TypeDescribe: func(d *decoder) Message {
		n := d.size("description", d.u32(), MaxAbout)
		d.zero32()
		return Describe{JSON: d.bytes(n)}
	},
	TypePush: parsePush,
	TypeHandoff: func(d *decoder) Message {
		m := Handoff{Lease: d.u64()}
		n := d.size("record", d.u32(), MaxRecord)
		d.zero32()
		m.Record = d.bytes(n)
		return m
	},
	TypeBind: func(d *decoder) Message {
		m := Bind{FirstToken: d.u32()}
		blocks := d.size("block list", d.u32(), MaxBlocks)
		ticket := d.size("ticket", uint32(d.u16()), MaxTicket)
		regions := d.size("region list", uint32(d.u16()), MaxRegions)
		d.zero32()
		m.Regions, m.Blocks, m.Ticket = d.u64s(regions), d.u32s(blocks), d.bytes(ticket)
		return m
	},
	TypeRefuse: func(d *decoder) Message {
		ticket := d.size("ticket", uint32(d.u16()), MaxTicket)
		reason := d.size("reason", uint32(d.u16()), MaxText)
		d.zero32()
		return Refuse{Ticket: d.bytes(ticket), Reason: d.text(reason)}
	},
	TypeRevoke: func(d *decoder) Message {
		m := Revoke{Lease: d.u64(), Nonce: d.nonce()}
		n := d.size("reason", uint32(d.u16()), MaxText)
		d.zero16()
		d.zero32()
		m.Reason = d.text(n)
		return m
	},
	TypePing:   func(d *decoder) Message { return Ping{Value: d.u64()} },
	TypePong:   func(d *decoder) Message { return Pong{Value: d.u64()} },
	TypeStatus: func(*decoder) Message { return Status{} },
	TypeSetupRing: func(d *decoder) Message {
		m := SetupRing{Submissions: d.u32(), Completions: d.u32()}
		d.zero32()
		d.zero32()
		return m
	},
	TypeStatusOK: func(d *decoder) Message {
		n := d.size("status", d.u32(), MaxStatus)
		d.zero32()
		return StatusOK{JSON: d.bytes(n)}
	},
	TypeOK: func(d *decoder) Message { return OK{Value: d.u64()} },
	TypeError: func(d *decoder) Message {
		e := &Error{Code: Code(d.u16())}
		n := d.size("text", uint32(d.u16()), MaxText)
		d.zero32()
		e.Text = d.text(n)
		return e
	},
}

func parsePresent(d *decoder) Message {
	m := Present{Tokens: d.u32()}
	blocks := d.size("block list", d.u32(), MaxBlocks)
	meta := d.size("meta", d.u32(), MaxMeta)
	ticket := d.size("ticket", uint32(d.u16()), MaxTicket)
	peer := d.size("peer address", uint32(d.u16()), MaxName)
	regions := d.size("region list", uint32(d.u16()), MaxRegions)
	d.zero16()
	d.zero32()
	m.Regions, m.Blocks, m.Ticket = d.u64s(regions), d.u32s(blocks), d.bytes(ticket)
	m.Peer, m.Meta = d.text(peer), d.bytes(meta)
	return m
}

// unitLen is the size of a unit range in PUSH.
const unitLen = 16

func parsePush(d *decoder) Message {
	m := Push{Lease: d.u64(), Seq: d.u64()}
	n := d.size("unit list", d.u32(), MaxUnits)
	d.zero32()
	if s := d.take(n * unitLen); len(s) > 0 {
		m.Units = make([]Unit, n)
		for i := range m.Units {
			u := s[i*unitLen:]
			m.Units[i] = Unit{Layer: le.Uint32(u), First: le.Uint32(u[4:]), Count: le.Uint32(u[8:]), Shard: le.Uint32(u[12:])}
		}
	}
	return m
}

func parseEvent(t Type, d *decoder) Message {
	e := Event{Kind: t, Lease: d.u64(), Nonce: d.nonce(), Seq: d.u64(), Tokens: d.u32(), FirstToken: d.u32()}
	layouts := d.size("layouts", d.u32(), MaxLayouts)
	data := d.size("data", d.u32(), MaxRecord)
	text := d.size("text", uint32(d.u16()), MaxText)
	e.Code = d.u16()
	d.zero32()
	e.Layouts, e.Text, e.Data = d.bytes(layouts), d.text(text), d.bytes(data)
	return e
}

// Versions is a range of protocol versions.
type Versions struct{ Min, Max uint16 }

// HelloVersions reads the part of HELLO that has its place in every version, also of a HELLO that does not parse.
func HelloVersions(p []byte) (Versions, bool) {
	if len(p) < 4 {
		return Versions{}, false
	}
	return Versions{Min: le.Uint16(p), Max: le.Uint16(p[2:])}, true
}
