package tfevents

import (
	"encoding/binary"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

// told is an event as it was read.
type told struct {
	wall    float64
	step    int64
	version string
	scalars []Scalar
	texts   []Text
}

// read takes a file apart by the published format, with no help of the writer's.
func read(t *testing.T, data []byte) (all []told) {
	t.Helper()
	unmasked := func(b []byte) uint32 {
		m := binary.LittleEndian.Uint32(b) - 0xa282ead8
		return m>>17 | m<<15
	}
	crc := func(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }
	for len(data) > 0 {
		n := binary.LittleEndian.Uint64(data)
		if unmasked(data[8:]) != crc(data[:8]) || unmasked(data[12+n:]) != crc(data[12:12+n]) {
			t.Fatal("a checksum is wrong")
		}
		all = append(all, readEvent(t, data[12:12+n]))
		data = data[16+n:]
	}
	return all
}

// fields calls f with each field of a message; fixed and varint values come as numbers.
func fields(t *testing.T, b []byte, f func(n protowire.Number, number uint64, bytes []byte)) {
	t.Helper()
	for len(b) > 0 {
		n, kind, size := protowire.ConsumeTag(b)
		if size < 0 {
			t.Fatal(protowire.ParseError(size))
		}
		b = b[size:]
		var number uint64
		var bytes []byte
		switch kind {
		case protowire.VarintType:
			number, size = protowire.ConsumeVarint(b)
		case protowire.Fixed64Type:
			number, size = protowire.ConsumeFixed64(b)
		case protowire.Fixed32Type:
			var v uint32
			v, size = protowire.ConsumeFixed32(b)
			number = uint64(v)
		default:
			bytes, size = protowire.ConsumeBytes(b)
		}
		if size < 0 {
			t.Fatal(protowire.ParseError(size))
		}
		f(n, number, bytes)
		b = b[size:]
	}
}

func readEvent(t *testing.T, b []byte) (e told) {
	fields(t, b, func(n protowire.Number, number uint64, b []byte) {
		switch n {
		case 1:
			e.wall = math.Float64frombits(number)
		case 2:
			e.step = int64(number)
		case 3:
			e.version = string(b)
		case 5:
			fields(t, b, func(_ protowire.Number, _ uint64, value []byte) {
				var tag, said, plugin string
				var v float64
				fields(t, value, func(n protowire.Number, number uint64, b []byte) {
					switch n {
					case 1:
						tag = string(b)
					case 2:
						v = float64(math.Float32frombits(uint32(number)))
					case 8:
						fields(t, b, func(n protowire.Number, number uint64, b []byte) {
							if n == 1 && number != 7 {
								t.Errorf("a tensor of type %d", number)
							}
							if n == 8 {
								said = string(b)
							}
						})
					case 9:
						fields(t, b, func(_ protowire.Number, _ uint64, b []byte) {
							fields(t, b, func(_ protowire.Number, _ uint64, b []byte) { plugin = string(b) })
						})
					}
				})
				if plugin == "text" {
					e.texts = append(e.texts, Text{tag, said})
				} else {
					e.scalars = append(e.scalars, Scalar{tag, v})
				}
			})
		}
	})
	return e
}

func TestFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	w, err := Create(dir, "0.here", 1.5)
	if err != nil {
		t.Fatal(err)
	}
	want := []told{{wall: 1.5, version: "brain.Event:2"}}
	for i := range 300 {
		e := told{wall: 2 + float64(i), step: int64(i), scalars: []Scalar{{"pools/prefill", float64(i)}, {"rate", 0.5}}}
		if i%100 == 7 {
			e.texts = []Text{{"decision", "more engines, as é"}}
		}
		want = append(want, e)
		if err := w.Add(e.wall, e.step, e.scalars, e.texts); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(filepath.Join(dir, "events.out.tfevents.0.here"))
	if err != nil {
		t.Fatal(err)
	}
	if got := read(t, data); !reflect.DeepEqual(got, want) {
		t.Errorf("read %d events, first %+v; want %d, first %+v", len(got), got[0], len(want), want[0])
	}
}

// TestFirstRecord holds the first bytes against those at the beginning of files that TensorFlow writes: 24 bytes of an event with a
// version, of which the length and its checksum are the same in all of them.
func TestFirstRecord(t *testing.T) {
	dir := t.TempDir()
	w, err := Create(dir, "x", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	data, err := os.ReadFile(filepath.Join(dir, "events.out.tfevents.x"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7f\x4b\x22"; string(data[:12]) != want {
		t.Errorf("%x, want %x", data[:12], want)
	}
}

func TestRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(file, "x", 0); err == nil {
		t.Error("a file is no directory")
	}
}
