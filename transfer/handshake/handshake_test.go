package handshake

import (
	"bytes"
	"encoding/hex"
	"net"
	"strings"
	"testing"
	"testing/synctest"
)

var wireKey = []byte("a cluster key of the tests")

// Computed by an independent implementation (Python hmac) over the same bytes.
const (
	goldenAcceptMAC = "15c47fc29c5f7f64189a61266a439bb006eb47ed782fd065c0967be6e7ecdd75"
	goldenDialMAC   = "abde46ecb7c678d14edde7edc260ac43539970b27b463307896387acffca3935"
)

func TestHelloIsGolden(t *testing.T) {
	h := Hello{versionMin: 1, versionMax: 1, Kind: KindLane, Lane: 3, Channel: [16]byte{9}, nonce: [32]byte{8}, From: Identity{"n", 5, []string{"rdma", "tcp"}}}
	b := h.marshal()
	want := "4845414452414345" + "0100" + "0100" + "0200" + "0300" + "09" + strings.Repeat("00", 15) + "08" + strings.Repeat("00", 31) +
		"016e" + strings.Repeat("00", 62) + "0500000000000000" + "0872646d612c746370" + strings.Repeat("00", 55)
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	c := challenge{version: 1, nonce: [32]byte{7}, From: Identity{"m", 6, nil}}
	a := c.marshal(wireKey, b)
	if got := hex.EncodeToString(a[184:]); got != goldenAcceptMAC {
		t.Errorf("accept code %s, want %s", got, goldenAcceptMAC)
	}
	if got := hex.EncodeToString(prove(wireKey, labelDial, b, a)); got != goldenDialMAC {
		t.Errorf("dial code %s, want %s", got, goldenDialMAC)
	}
}

func TestHandshakeNeedsTheKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			name            string
			dialKey, accKey []byte
			status          uint16
			dialErr, accErr string
		}{
			{"same key", wireKey, wireKey, StatusOK, "", ""},
			{"other key", []byte("another cluster key"), wireKey, StatusOK, "another cluster key", "read proof"},
			{"not expected", wireKey, wireKey, StatusNotExpected, "not expect", "status 3"},
		} {
			near, far := net.Pipe()
			got := make(chan error, 1)
			go func() {
				_, err := Accept(far, c.accKey, Identity{"acceptor", 2, []string{"tcp"}}, false, func(*Hello) uint16 { return c.status })
				far.Close()
				got <- err
			}()
			peer, err := Dial(near, c.dialKey, Identity{"dialler", 1, nil}, KindControl, 0, [16]byte{1})
			near.Close()
			for _, e := range []struct {
				err  error
				want string
			}{{err, c.dialErr}, {<-got, c.accErr}} {
				if (e.err == nil) != (e.want == "") || e.err != nil && !strings.Contains(e.err.Error(), e.want) {
					t.Errorf("%s: %v, want %q", c.name, e.err, e.want)
				}
			}
			if err == nil && (peer.NodeID != "acceptor" || peer.Epoch != 2) {
				t.Errorf("peer is %+v", peer)
			}
		}
	})
}

// A caller that knows no key cannot use a daemon's answer to prove itself to it: the labels differ.
func TestHandshakeReflection(t *testing.T) {
	if bytes.Equal(prove(wireKey, labelAccept, []byte("x")), prove(wireKey, labelDial, []byte("x"))) {
		t.Fatal("both ends' proofs are the same")
	}
}

func FuzzHello(f *testing.F) {
	h := Hello{versionMin: 1, versionMax: 1, Kind: KindLane, Lane: 3, From: Identity{"n", 5, []string{"rdma", "tcp"}}}
	f.Add(h.marshal())
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHello(b)
		if err != nil {
			return
		}
		if again := h.marshal(); !bytes.Equal(again, b) {
			t.Error("decoding is not the inverse of encoding")
		}
	})
}

func FuzzChallenge(f *testing.F) {
	c := challenge{version: 1, From: Identity{"m", 6, []string{"tcp"}}}
	f.Add(c.marshal(wireKey, []byte("hello"))[:184])
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 184 {
			b = b[:184]
		}
		parseChallenge(wireKey, []byte("hello"), append(bytes.Clone(b), prove(wireKey, labelAccept, []byte("hello"), b)...))
	})
}
