package transfer_test

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/transporttest"
)

// examined is an engine that lets itself be examined by f, nil for not.
func examined(t *testing.T, f func(context.Context, net.Conn) error) *transfer.Engine {
	t.Helper()
	e, err := transfer.New(transfer.Config{
		NodeID: "node-d", ClusterKey: transporttest.Key, Listen: "127.0.0.1:0", Transports: []transfer.Transport{tcp.New(tcp.Config{})}, Examiner: f,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

func TestExamination(t *testing.T) {
	busy := make(chan struct{}, 8)
	e := examined(t, func(ctx context.Context, c net.Conn) error {
		busy <- struct{}{}
		_, err := io.Copy(c, c)
		return err
	})
	var open []net.Conn
	for range 2 {
		c := dial(t, e.DataAddr())
		peer, transports, err := transfer.DialExam(c, transporttest.Key, "doctor")
		if err != nil || peer != "node-d" || len(transports) != 1 || transports[0] != "tcp" {
			t.Fatalf("%s, %v, %v", peer, transports, err)
		}
		<-busy
		open = append(open, c)
	}
	if _, _, err := transfer.DialExam(dial(t, e.DataAddr()), transporttest.Key, "doctor"); !errors.Is(err, transfer.ErrHandshake) {
		t.Errorf("a third examination at a time: %v", err)
	}
	if _, err := open[0].Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	if _, err := io.ReadFull(open[0], b[:]); err != nil || b[0] != 'x' {
		t.Errorf("read %q, %v", b, err)
	}
	open[0].Close()
	for deadline := time.Now().Add(20 * time.Second); ; { // its place is free soon
		_, _, err := transfer.DialExam(dial(t, e.DataAddr()), transporttest.Key, "doctor")
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	if err := e.Close(); err != nil { // examinations do not hold it up
		t.Fatal(err)
	}
	if _, err := io.ReadFull(open[1], b[:]); err == nil {
		t.Error("an examination outlives its engine")
	}
}

func TestExaminationsMayBeRefused(t *testing.T) {
	e := examined(t, nil)
	if _, _, err := transfer.DialExam(dial(t, e.DataAddr()), transporttest.Key, "doctor"); !errors.Is(err, transfer.ErrHandshake) {
		t.Errorf("no examiner: %v", err)
	}
	e = examined(t, func(context.Context, net.Conn) error { t.Error("examined without the key"); return nil })
	if _, _, err := transfer.DialExam(dial(t, e.DataAddr()), []byte("another key of 16 bytes"), "doctor"); !errors.Is(err, transfer.ErrHandshake) {
		t.Errorf("another key: %v", err)
	}
}

func TestAcceptExamTakesNothingElse(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	done := make(chan error, 1)
	go func() {
		_, err := transfer.AcceptExam(far, transporttest.Key, "d", nil)
		far.Close()
		done <- err
	}()
	if _, err := transfer.DialHandshake(near, transporttest.Key, "node-p", 1, transfer.KindControl, 0, [16]byte{1}, "tcp"); err == nil {
		t.Error("a channel was accepted for an examination")
	}
	if err := <-done; err == nil {
		t.Error("a channel was accepted for an examination")
	}
}
