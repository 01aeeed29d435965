package wire

import (
	"encoding/binary"
	"fmt"
)

var le = binary.LittleEndian

// decoder walks a payload. The first fault is kept, later reads yield zeros: parsers stay linear.
type decoder struct {
	b   []byte
	off int
	err error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
	}
}

func (d *decoder) take(n int) []byte {
	if d.err != nil {
		return nil
	}
	if n > len(d.b)-d.off {
		d.fail("payload of %d bytes ends inside a field of %d at offset %d", len(d.b), n, d.off)
		return nil
	}
	s := d.b[d.off : d.off+n]
	d.off += n
	return s
}

func (d *decoder) u16() uint16 {
	if s := d.take(2); s != nil {
		return le.Uint16(s)
	}
	return 0
}

func (d *decoder) u32() uint32 {
	if s := d.take(4); s != nil {
		return le.Uint32(s)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if s := d.take(8); s != nil {
		return le.Uint64(s)
	}
	return 0
}

func (d *decoder) nonce() (n [16]byte) {
	copy(n[:], d.take(16))
	return n
}

// zero16 and zero32 read reserved fields. Refusing other values keeps them usable by later versions.
func (d *decoder) zero16() {
	if v := d.u16(); v != 0 {
		d.fail("reserved field at offset %d is %#x, want 0", d.off-2, v)
	}
}

func (d *decoder) zero32() {
	if v := d.u32(); v != 0 {
		d.fail("reserved field at offset %d is %#x, want 0", d.off-4, v)
	}
}

// size checks a length or count from the wire against its limit before anything is made from it.
func (d *decoder) size(what string, n uint32, limit int) int {
	if d.err == nil && n > uint32(limit) {
		d.fail("%s of %d exceeds the limit of %d", what, n, limit)
	}
	if d.err != nil {
		return 0
	}
	return int(n)
}

// bytes copies, because readers reuse their buffer.
func (d *decoder) bytes(n int) []byte {
	if n == 0 || d.err != nil {
		return nil
	}
	s := d.take(n)
	if s == nil {
		return nil
	}
	return append([]byte(nil), s...)
}

func (d *decoder) text(n int) string { return string(d.take(n)) }

func (d *decoder) u32s(n int) []uint32 {
	s := d.take(n * 4)
	if len(s) == 0 {
		return nil
	}
	v := make([]uint32, n)
	for i := range v {
		v[i] = le.Uint32(s[i*4:])
	}
	return v
}

func (d *decoder) u64s(n int) []uint64 {
	s := d.take(n * 8)
	if len(s) == 0 {
		return nil
	}
	v := make([]uint64, n)
	for i := range v {
		v[i] = le.Uint64(s[i*8:])
	}
	return v
}

func (d *decoder) end() error {
	if d.err == nil && d.off != len(d.b) {
		d.fail("%d bytes after the message", len(d.b)-d.off)
	}
	return d.err
}

func appendU32s(b []byte, v []uint32) []byte {
	for _, x := range v {
		b = le.AppendUint32(b, x)
	}
	return b
}

func appendU64s(b []byte, v []uint64) []byte {
	for _, x := range v {
		b = le.AppendUint64(b, x)
	}
	return b
}

// checkLen refuses what the peer would refuse, before it is sent.
func checkLen(what string, n, limit int) error {
	if n > limit {
		return Errorf(CodeLimit, "%s of %d exceeds the limit of %d", what, n, limit)
	}
	return nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
