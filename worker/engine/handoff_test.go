package engine

import (
	"bytes"
	"encoding/hex"
	"testing"
)

func TestHandoffGoldenBytes(t *testing.T) {
	r := record{position: 3, cached: 16, tokens: []int32{7, -1}}
	const want = "01000000030000001000000002000000" + "07000000ffffffff"
	if got := hex.EncodeToString(r.encode()); got != want {
		t.Fatalf("record %s, want %s", got, want)
	}
	const meta = "0100000003000000" + "2900c0eac9c8c3aa"
	got := hex.EncodeToString(promptMeta{tokens: 3, hash: 0xaac3c8c9eac00029}.encode())
	if got != meta {
		t.Fatalf("meta %s, want %s", got, meta)
	}
}

func FuzzHandoff(f *testing.F) {
	f.Add(record{position: 1, tokens: []int32{1, 2}}.encode())
	f.Add(metaOf([]int32{1, 2, 3}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := decodeRecord(b); err == nil && b[1] == 0 && b[2] == 0 && b[3] == 0 && !bytes.Equal(r.encode(), b) {
			t.Fatalf("record %x came back as %x", b, r.encode())
		}
		if m, err := decodeMeta(b); err == nil && b[1] == 0 && b[2] == 0 && b[3] == 0 && !bytes.Equal(m.encode(), b) {
			t.Fatalf("meta %x came back as %x", b, m.encode())
		}
	})
}
