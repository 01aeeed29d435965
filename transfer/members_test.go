package transfer_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/shm"
	"github.com/headrace/headrace/transfer/ticket"
	"github.com/headrace/headrace/transfer/transporttest"
)

// Members count for an engine of their own user alone, whoever comes first.
func TestMembersHaveTheirEnginesOwner(t *testing.T) {
	e, err := transfer.New(transfer.Config{NodeID: "node", ClusterKey: transporttest.Key, Transports: []transfer.Transport{shm.New()}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	attach := func(id string, owner uint32) *transfer.Client {
		t.Helper()
		c, err := e.AttachAs(id, owner, func(transfer.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	lend := func(c *transfer.Client) {
		t.Helper()
		l := transporttest.DefaultShape.Layout()
		size := l.LayerStride * uint64(l.Layers)
		if _, err := c.AddRegion(transporttest.NewMemory(t, size).FD(t), size, l, 0); err != nil {
			t.Fatal(err)
		}
	}
	early := attach("p/early", 1000)
	if err := early.Join("p"); err != nil { // it is not known yet whose engine that will be
		t.Fatal(err)
	}
	lend(early)
	p := attach("p", 1001)
	late := attach("p/late", 1000)
	if err := late.Join("p"); !errors.Is(err, transfer.ErrDenied) || !strings.Contains(err.Error(), "belongs to user 1001") {
		t.Errorf("another user's rank joins: %v", err)
	}
	present := func() error {
		raw := ticket.Mint(transporttest.Key, ticket.Ticket{Nonce: ticket.NewNonce(), PNode: "node", DNode: "node", PEngine: "p", DEngine: "d",
			Fingerprint: transporttest.Fingerprint, Deadline: time.Now().Add(time.Minute)})
		_, err := p.Present(transfer.PresentReq{Ticket: raw, Tokens: 16, Blocks: []uint32{1}})
		return err
	}
	if err := present(); !errors.Is(err, transfer.ErrRanksMissing) {
		t.Errorf("another user's rank counts: %v", err)
	}
	if err := early.Push(1, []transfer.Unit{{Count: 1}}, 1); !errors.Is(err, transfer.ErrUnknownLease) {
		t.Errorf("another user's rank pushes: %v", err)
	}
	own := attach("p/0", 1001)
	if err := own.Join("p"); err != nil {
		t.Fatal(err)
	}
	lend(own)
	if err := present(); err != nil {
		t.Error(err)
	}
}
