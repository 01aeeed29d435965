package node_test

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/ring"
	"github.com/headrace/headrace/transfer/node/wire"
	"github.com/headrace/headrace/transfer/ticket"
)

const protocolDoc = "../../docs/protocol.md"

// documented are the bytes the document must show.
func documented(t *testing.T) map[string]string {
	out := map[string]string{}
	for _, g := range wire.Golden() {
		out[g.Name] = g.Hex
	}
	for name, dump := range ring.Golden() {
		out[name] = dump
	}
	key := make([]byte, 32)
	for i := range key {
		key[i] = byte(i)
	}
	tk := ticket.Ticket{PNode: "node-a", DNode: "node-b", PEngine: "prefill-0", DEngine: "decode-0", Deadline: time.UnixMilli(1800000000000)}
	l := transfer.Layout{DType: transfer.F32, Layers: 2, Blocks: 8, BlockTokens: 16, Planes: 2, Heads: 3, HeadsTotal: 3, HeadBytes: 256, TPSize: 1,
		LayerStride: 8 * 2 * 16 * 768, BlockStride: 2 * 16 * 768, PlaneStride: 16 * 768, TokenStride: 768, HeadStride: 256}
	for i := range 32 {
		tk.Fingerprint[i], l.Fingerprint[i] = 0x11, 0x11
	}
	for i := range tk.Nonce {
		tk.Nonce[i] = byte(0xa0 + i)
	}
	out["TICKET"] = hex.EncodeToString(ticket.Mint(key, tk))
	layout, err := l.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Validate(l.LayerStride * 2); err != nil {
		t.Error(err)
	}
	out["LAYOUT"] = hex.EncodeToString(layout)
	var head [transfer.DataHeaderSize]byte
	p := transfer.Piece{Lease: 5, Epoch: 0x1122334455667788, ID: 9, Stripe: 1, First: 0, Count: 3, Bytes: 12288}
	p.PutHeader(&head)
	out["DATA_HEADER"] = hex.EncodeToString(head[:])
	var trailer [transfer.DataTrailerSize]byte
	transfer.PutTrailer(&trailer, true, 0)
	out["DATA_TRAILER"] = hex.EncodeToString(trailer[:])
	return out
}

// The document's dumps are the code's bytes. HEADRACE_UPDATE=1 writes them.
func TestProtocolDocument(t *testing.T) {
	doc, err := os.ReadFile(protocolDoc)
	if err != nil {
		t.Fatal(err)
	}
	want := documented(t)
	dump := regexp.MustCompile("(?s)```hex (\\w+)\n(.*?)\n```")
	seen := map[string]bool{}
	updated := dump.ReplaceAllFunc(doc, func(block []byte) []byte {
		m := dump.FindSubmatch(block)
		name, got := string(m[1]), strings.Join(strings.Fields(string(m[2])), "")
		seen[name] = true
		if got == want[name] {
			return block
		}
		if os.Getenv("HEADRACE_UPDATE") == "" {
			t.Errorf("%s in %s is %s, the code's is %s", name, protocolDoc, got, want[name])
		}
		return fmt.Appendf(nil, "```hex %s\n%s\n```", name, hexLines(want[name]))
	})
	for name := range want {
		if !seen[name] {
			t.Errorf("%s is not in %s", name, protocolDoc)
		}
	}
	if !bytes.Equal(updated, doc) && os.Getenv("HEADRACE_UPDATE") != "" {
		if err := os.WriteFile(protocolDoc, updated, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for code := wire.Code(1); code <= wire.CodeRanksMissing; code++ {
		if !regexp.MustCompile(fmt.Sprintf(`(?m)^ +%d %s +\S`, code, code)).Match(doc) {
			t.Errorf("%s lacks code %d %s", protocolDoc, code, code)
		}
	}
}

func hexLines(s string) string {
	var lines []string
	for len(s) > 0 {
		n := min(len(s), 64)
		var pairs []string
		for i := 0; i < n; i += 2 {
			pairs = append(pairs, s[i:i+2])
		}
		lines, s = append(lines, strings.Join(pairs, " ")), s[n:]
	}
	return strings.Join(lines, "\n")
}

// A handshake made from the document alone, constants and all.
func TestProtocolDocumentHandshake(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "tcp"})
	for name, c := range map[string]struct {
		key    []byte
		kind   uint16
		status uint16
	}{"control": {clusterKey, 1, 0}, "wrong key": {[]byte("another cluster key, also 32 byte"), 1, 4}, "stray lane": {clusterKey, 2, 3}} {
		conn, err := net.Dial("tcp", r.DataAddr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		hello := make([]byte, 200)
		copy(hello, "HEADRACE")
		for i, v := range []uint16{2, 2, c.kind, 0} {
			binary.LittleEndian.PutUint16(hello[8+2*i:], v)
		}
		copy(hello[16:64], bytes.Repeat([]byte{byte(len(name))}, 48)) // a channel of its own

		copy(hello[64:], "\x06node-x")
		copy(hello[136:], "\x03tcp")
		if _, err := conn.Write(hello); err != nil {
			t.Fatal(err)
		}
		challenge := make([]byte, 216)
		if _, err := io.ReadFull(conn, challenge); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if status := binary.LittleEndian.Uint16(challenge[10:]); status != 0 || string(challenge[48:55]) != "\x06node-a" {
			t.Errorf("%s: challenge % x", name, challenge)
		}
		if !hmac.Equal(challenge[184:], sum(clusterKey, "headrace 1 accept", hello, challenge[:184])) {
			t.Errorf("%s: the challenge's HMAC is not the document's", name)
		}
		if _, err := conn.Write(sum(c.key, "headrace 1 dial", hello, challenge)); err != nil {
			t.Fatal(err)
		}
		ready := make([]byte, 4)
		if _, err := io.ReadFull(conn, ready); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if status := binary.LittleEndian.Uint16(ready); status != c.status {
			t.Errorf("%s: status %d, want %d", name, status, c.status)
		}
	}
}

func sum(key []byte, label string, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(label))
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)
}
