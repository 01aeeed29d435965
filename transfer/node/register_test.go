package node_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/transfer/tcp"
)

// slowCards is a transport whose devices take their time to pin memory.
type slowCards struct {
	transfer.Transport
	began, proceed chan struct{}
}

func (s *slowCards) Register(*transfer.Region) ([]byte, error) {
	s.began <- struct{}{}
	<-s.proceed
	return []byte("key"), nil
}

func (s *slowCards) Unregister(*transfer.Region) error { return nil }

// slowNode runs a daemon with them.
func slowNode(t *testing.T) (s *slowCards, socket string) {
	t.Helper()
	s = &slowCards{Transport: tcp.New(tcp.Config{}), began: make(chan struct{}), proceed: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	socket = filepath.Join(t.TempDir(), "node.sock")
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- node.Run(ctx, node.Config{NodeID: "slow", Socket: socket, ClusterKey: clusterKey, Listen: "127.0.0.1:0", Transport: "tcp",
			Transports: []transfer.Transport{s}, OnReady: func(node.Ready) { close(ready) }})
	}()
	<-ready
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s, socket
}

// While memory is registered the engine's other requests are answered: its PINGs above all, or it would give the daemon up.
func TestRegisteringHoldsNothingUp(t *testing.T) {
	s, socket := slowNode(t)
	ctx := t.Context()
	c, err := nodeclient.Dial(ctx, socket, nodeclient.Options{EngineID: "e", OnEvent: func(transfer.Event) {}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	l := testLayout()
	mem, err := memfd.Create("slow", layoutSize(l))
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	type result struct {
		id  transfer.RegionID
		err error
	}
	register := func() chan result {
		out := make(chan result, 1)
		go func() {
			id, err := c.RegisterRegion(ctx, mem.FD(), mem.Size(), l)
			out <- result{id, err}
		}()
		<-s.began
		return out
	}
	first := register()
	limited, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	if _, err := c.Status(limited); err != nil {
		t.Errorf("a request beside it: %v", err)
	}
	second := register() // two at a time
	close(s.proceed)
	a, b := <-first, <-second
	if err := errors.Join(a.err, b.err); err != nil || a.id == b.id || a.id == 0 || b.id == 0 {
		t.Errorf("regions %d and %d, %v", a.id, b.id, err)
	}
}

// An engine that leaves meanwhile leaves nothing behind.
func TestLeavingWhileRegistering(t *testing.T) {
	s, socket := slowNode(t)
	ctx := t.Context()
	l := testLayout()
	mem, err := memfd.Create("slow", layoutSize(l))
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	attach := func() (*nodeclient.Client, error) {
		return nodeclient.Dial(ctx, socket, nodeclient.Options{EngineID: "e", OnEvent: func(transfer.Event) {}})
	}
	c, err := attach()
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() {
		_, err := c.RegisterRegion(ctx, mem.FD(), mem.Size(), l)
		failed <- err
	}()
	<-s.began
	before := leaktest.Descriptors(t)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-failed; err == nil {
		t.Error("registered by who has left")
	}
	close(s.proceed)
	again, err := attach() // waits until all of the earlier connection is gone
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	st, err := again.Status(ctx)
	if err != nil || len(st.Engines) != 1 || len(st.Engines[0].Regions) != 0 {
		t.Errorf("%+v, %v", st.Engines, err)
	}
	eventually(t, "descriptors closed", func() bool { return leaktest.Descriptors(t) <= before })
}
