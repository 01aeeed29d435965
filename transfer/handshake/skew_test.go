package handshake

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// Two daemons without a common version say so, both, with both ranges and who is to be upgraded.
func TestVersionSkew(t *testing.T) {
	key := []byte("a cluster key of some length")
	for _, c := range []struct {
		low, high uint16 // of the dialling end
		says      string // the accepting one
	}{
		{versionMax + 1, versionMax + 3, "upgrade this node"},
		{0, versionMin - 1, "upgrade node old"},
	} {
		near, far := net.Pipe()
		deadline := time.Now().Add(20 * time.Second)
		_, _ = near.SetDeadline(deadline), far.SetDeadline(deadline)
		accepted := make(chan error, 1)
		from := "new"
		if c.high < versionMin {
			from = "old"
		}
		go func() {
			_, err := Accept(far, key, Identity{NodeID: "accepting"}, false, func(*Hello) uint16 { return StatusOK })
			accepted <- err
			far.Close()
		}()
		h := Hello{versionMin: c.low, versionMax: c.high, Kind: KindControl, From: Identity{NodeID: from}}
		said := h.marshal()
		if _, err := near.Write(said); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, challengeSize)
		if _, err := io.ReadFull(near, answer); err != nil {
			t.Fatal(err)
		}
		ch, err := parseChallenge(key, said, answer)
		if err != nil || ch.status != statusNoVersion || ch.low != versionMin || ch.high != versionMax {
			t.Errorf("challenge %+v, %v", ch, err)
		}
		err = <-accepted
		if !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("the accepting end: %v", err)
		}
		t.Log(err)
		near.Close()
	}
	if err := skew("x", versionMax+1, versionMax+2); !strings.Contains(err.Error(), "upgrade this node") {
		t.Error(err)
	}
	if err := skew("x", 0, versionMin-1); !strings.Contains(err.Error(), "upgrade node x") {
		t.Error(err)
	}
}
