package wire

import (
	"bytes"
	"testing"
)

// fuzz checks on arbitrary payloads of one type that parsing never panics and that what parses is canonical.
func fuzz(f *testing.F, typ Type) {
	for _, m := range samples() {
		f.Add(m.append(nil))
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		m, err := Parse(typ, p)
		if err != nil {
			if len(err.Error()) > MaxText {
				t.Fatalf("error text of %d bytes", len(err.Error()))
			}
			return
		}
		if m.Type() != typ {
			t.Fatalf("parsed a %s from a %s", m.Type(), typ)
		}
		frame, err := AppendFrame(nil, uint8(VersionMax), 0, 1, m)
		if err != nil {
			t.Fatalf("parsed what cannot be sent: %v", err)
		}
		if !bytes.Equal(frame[HeaderLen:], p) {
			t.Fatalf("not canonical: %x parsed to %+v, which is %x", p, m, frame[HeaderLen:])
		}
	})
}

func FuzzHello(f *testing.F)          { fuzz(f, TypeHello) }
func FuzzHelloOK(f *testing.F)        { fuzz(f, TypeHelloOK) }
func FuzzRegisterRegion(f *testing.F) { fuzz(f, TypeRegisterRegion) }
func FuzzRegisterDMABuf(f *testing.F) { fuzz(f, TypeRegisterDMABuf) }
func FuzzRemoveRegion(f *testing.F)   { fuzz(f, TypeRemoveRegion) }
func FuzzPresent(f *testing.F)        { fuzz(f, TypePresent) }
func FuzzExtend(f *testing.F)         { fuzz(f, TypeExtend) }
func FuzzJoin(f *testing.F)           { fuzz(f, TypeJoin) }
func FuzzDescribe(f *testing.F)       { fuzz(f, TypeDescribe) }
func FuzzPush(f *testing.F)           { fuzz(f, TypePush) }
func FuzzHandoff(f *testing.F)        { fuzz(f, TypeHandoff) }
func FuzzBind(f *testing.F)           { fuzz(f, TypeBind) }
func FuzzRefuse(f *testing.F)         { fuzz(f, TypeRefuse) }
func FuzzRevoke(f *testing.F)         { fuzz(f, TypeRevoke) }
func FuzzPing(f *testing.F)           { fuzz(f, TypePing) }
func FuzzPong(f *testing.F)           { fuzz(f, TypePong) }
func FuzzStatus(f *testing.F)         { fuzz(f, TypeStatus) }
func FuzzSetupRing(f *testing.F)      { fuzz(f, TypeSetupRing) }
func FuzzStatusOK(f *testing.F)       { fuzz(f, TypeStatusOK) }
func FuzzOK(f *testing.F)             { fuzz(f, TypeOK) }
func FuzzError(f *testing.F)          { fuzz(f, TypeError) }
func FuzzEvent(f *testing.F)          { fuzz(f, TypePresented) }

// FuzzFrame reads arbitrary bytes as a header and what follows.
func FuzzFrame(f *testing.F) {
	for _, m := range samples() {
		b, _ := AppendFrame(nil, uint8(VersionMax), 0, goldenID(m), m)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHeader(b)
		if err != nil || int(h.Length) > len(b)-HeaderLen {
			return
		}
		m, err := Parse(h.Type, b[HeaderLen:HeaderLen+int(h.Length)])
		if err != nil {
			return
		}
		again, err := AppendFrame(nil, h.Version, h.Flags, h.Request, m)
		if err != nil || !bytes.Equal(again, b[:len(again)]) {
			t.Fatalf("frame %x became %x, %v", b, again, err)
		}
	})
}
