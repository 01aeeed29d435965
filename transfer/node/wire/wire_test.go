package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
)

func seq16() (n [16]byte) {
	for i := range n {
		n[i] = byte(0xa0 + i)
	}
	return n
}

// samples holds one message of each type with every field set; the golden file and the fuzz seeds come from it.
func samples() []Message {
	return []Message{
		Hello{VersionMin: 2, VersionMax: 2, SilenceMS: 3000, EngineID: "prefill-0"},
		HelloOK{Version: 2, PID: 4242, Epoch: 0x1122334455667788, MaxPayload: MaxPayload, MaxInflight: 1024, PingMS: 500, SilenceMS: 2500, NodeID: "node-a", DataAddr: "10.0.0.1:7500"},
		RegisterRegion{Size: 1 << 20, Layout: []byte{1, 2, 3, 4}},
		RemoveRegion{Region: 7},
		Present{Regions: []uint64{7, 10}, Tokens: 33, Ticket: []byte("TICKET"), Peer: "10.0.0.2:7500", Meta: []byte("meta"), Blocks: []uint32{5, 9, 2}},
		Push{Lease: 11, Seq: 3, Units: []Unit{{Layer: 0, First: 0, Count: 3}, {Layer: 1, First: 0, Count: 2, Shard: 1}}},
		Handoff{Lease: 11, Record: []byte("record")},
		Bind{Regions: []uint64{8, 9}, FirstToken: 16, Ticket: []byte("TICKET"), Blocks: []uint32{0, 4, 6}},
		Refuse{Ticket: []byte("TICKET"), Reason: "no blocks"},
		Revoke{Lease: 11, Nonce: seq16(), Reason: "client left"},
		Ping{Value: 99},
		Pong{Value: 99},
		Status{},
		SetupRing{Submissions: 256, Completions: 512},
		RegisterDMABuf{Size: 1 << 20, Offset: 4096, Address: 0x7f0000001000, Flags: 1, Layout: []byte{1, 2, 3, 4}, Device: "0000:3b:00.0"},
		Extend{Lease: 11, Blocks: []uint32{7, 3}},
		Join{EngineID: "prefill-0"},
		Describe{JSON: []byte(`{"engine":"vllm"}`)},
		StatusOK{JSON: []byte(`{"node":"a"}`)},
		OK{Value: 7},
		&Error{Code: CodeRegion, Text: "memfd is not sealed against shrinking"},
		Event{Kind: TypePresented, Nonce: seq16(), Tokens: 33, Layouts: []byte{1, 2, 3, 4}, Text: "prefill-0", Data: []byte("meta")},
		Event{Kind: TypeBound, Lease: 11, Nonce: seq16(), Tokens: 33, FirstToken: 16},
		Event{Kind: TypeRefused, Lease: 11, Nonce: seq16(), Text: "no blocks"},
		Event{Kind: TypePushed, Lease: 11, Nonce: seq16(), Seq: 3},
		Event{Kind: TypeSettled, Lease: 12, Nonce: seq16(), Data: []byte("record")},
		Event{Kind: TypeEnded, Lease: 12, Nonce: seq16(), Code: 4, Text: "client left"},
		Event{Kind: TypeGoodbye, Code: uint16(CodeShutdown), Text: "daemon is stopping"},
		Event{Kind: TypeDraining},
	}
}

func TestGolden(t *testing.T) {
	want := Golden()
	var seen = map[Type]bool{}
	for i, m := range samples() {
		seen[m.Type()] = true
		frame, err := AppendFrame(nil, uint8(VersionMax), 0, goldenID(m), m)
		if err != nil {
			t.Fatalf("%s: %v", m.Type(), err)
		}
		if i >= len(want) {
			t.Errorf("%s has no golden bytes: {%q, %q},", m.Type(), m.Type(), hex.EncodeToString(frame))
			continue
		}
		if got := hex.EncodeToString(frame); want[i].Name != m.Type().String() || got != want[i].Hex {
			t.Errorf("%s: got %s\nwant %s %s", m.Type(), got, want[i].Name, want[i].Hex)
		}
		h, err := ParseHeader(frame)
		if err != nil || h.Type != m.Type() || int(h.Length) != len(frame)-HeaderLen || h.Version != uint8(VersionMax) {
			t.Errorf("%s: header %+v, %v", m.Type(), h, err)
		}
		back, err := Parse(h.Type, frame[HeaderLen:])
		if err != nil || !reflect.DeepEqual(back, m) {
			t.Errorf("%s: parsed %+v, %v, want %+v", m.Type(), back, err, m)
		}
	}
	for typ := range typeNames {
		if !seen[typ] {
			t.Errorf("%s has no sample", typ)
		}
	}
}

func goldenID(m Message) uint64 {
	if m.Type().IsEvent() {
		return 0
	}
	return 0x0102030405060708
}

// Each truncation and each surplus byte of each message is refused, with a reason.
func TestParseRefusesWrongLengths(t *testing.T) {
	for _, m := range samples() {
		p := m.append(nil)
		for n := range p {
			if _, err := Parse(m.Type(), p[:n]); !errors.Is(err, &Error{Code: CodeMalformed}) {
				t.Errorf("%s cut to %d of %d bytes: %v", m.Type(), n, len(p), err)
			}
		}
		if _, err := Parse(m.Type(), append(p, 0)); !errors.Is(err, &Error{Code: CodeMalformed}) {
			t.Errorf("%s with a surplus byte: %v", m.Type(), err)
		}
	}
}

func TestParseRefusesOverflow(t *testing.T) {
	present := Present{Regions: []uint64{1}, Blocks: []uint32{1}}.append(nil)
	le.PutUint32(present[4:], 0x40000001) // times 4 wraps to 4 in 32 bits
	push := Push{Units: []Unit{{}}}.append(nil)
	le.PutUint32(push[16:], 0x10000001) // times 16 wraps to 16
	regions := Bind{Regions: []uint64{1}}.append(nil)
	le.PutUint16(regions[10:], MaxRegions+1)
	record := Handoff{Record: []byte("x")}.append(nil)
	le.PutUint32(record[8:], 0xffffffff)
	reserved := Handoff{Record: []byte("x")}.append(nil)
	reserved[12] = 1
	for _, c := range []struct {
		t    Type
		p    []byte
		want string
	}{
		{TypePresent, present, "block list of 1073741825 exceeds"},
		{TypePush, push, "unit list of 268435457 exceeds"},
		{TypeBind, regions, "region list of 65 exceeds"},
		{TypeHandoff, record, "record of 4294967295 exceeds"},
		{TypeHandoff, reserved, "reserved field at offset 12"},
		{Type(0x3f), nil, "not a message"},
	} {
		if _, err := Parse(c.t, c.p); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.t, err, c.want)
		}
	}
}

func TestAppendFrameRefusesWhatPeersRefuse(t *testing.T) {
	for _, m := range []Message{
		Hello{}, Hello{EngineID: strings.Repeat("x", MaxName+1)},
		Handoff{Record: make([]byte, MaxRecord+1)}, Push{Units: make([]Unit, MaxUnits+1)},
		Present{Blocks: make([]uint32, MaxBlocks+1)}, Present{Regions: make([]uint64, MaxRegions+1)}, Bind{Regions: make([]uint64, MaxRegions+1)}, Bind{Ticket: make([]byte, MaxTicket+1)},
	} {
		if b, err := AppendFrame([]byte("kept"), 1, 0, 1, m); err == nil || string(b) != "kept" {
			t.Errorf("%s: %v, %d bytes", m.Type(), err, len(b))
		}
	}
}

func TestParseHeaderRefuses(t *testing.T) {
	good := make([]byte, HeaderLen)
	putHeader(good, Header{Version: 1, Type: TypePing, Length: 8, Request: 1})
	for name, edit := range map[string]func([]byte){
		"magic":    func(b []byte) { b[0] ^= 1 },
		"reserved": func(b []byte) { b[5] = 1 },
		"length":   func(b []byte) { le.PutUint32(b[8:], MaxPayload+1) },
	} {
		b := bytes.Clone(good)
		edit(b)
		if _, err := ParseHeader(b); !errors.Is(err, &Error{Code: CodeFraming}) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ParseHeader(good[:10]); err == nil {
		t.Error("short header accepted")
	}
}
