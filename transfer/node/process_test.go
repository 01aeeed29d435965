package node_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/internal/stall"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/nodeclient"
)

// engineConfig is a prefill engine in a process of its own: it lends the memfd it inherited, presents, pushes everything
// once bound, says so, and waits to be killed.
type engineConfig struct {
	Socket, ID, Peer string
	Ticket           []byte
	Tokens           uint32
	Blocks           []uint32
	Layout           []byte
}

func engineChild(doc string) error {
	var c engineConfig
	if err := json.Unmarshal([]byte(doc), &c); err != nil {
		return err
	}
	l, err := transfer.UnmarshalLayout(c.Layout)
	if err != nil {
		return err
	}
	ctx := untilStdinCloses()
	bound := make(chan struct{})
	client, err := nodeclient.Dial(ctx, c.Socket, nodeclient.Options{EngineID: c.ID, OnEvent: func(ev transfer.Event) {
		if ev.Kind == transfer.EventBound {
			close(bound)
		}
	}})
	if err != nil {
		return err
	}
	const inherited = 3
	region, err := client.RegisterRegion(ctx, inherited, layoutSize(l), l)
	if err != nil {
		return err
	}
	lease, err := client.Present(ctx, transfer.PresentReq{Ticket: c.Ticket, Peer: c.Peer, Regions: []transfer.RegionID{region}, Tokens: c.Tokens, Blocks: c.Blocks, Meta: []byte("meta")})
	if err != nil {
		return err
	}
	select {
	case <-bound:
	case <-ctx.Done():
		return nil
	}
	if err := client.Push(ctx, lease, []transfer.Unit{{Layer: 0, Count: l.Blocks}}, 1); err != nil {
		return err
	}
	fmt.Println("pushed")
	<-ctx.Done()
	return nil
}

// startEngineProcess runs a's P in a process of its own; a.p is only its description.
func startEngineProcess(t *testing.T, socket string, a *attempt) *child {
	t.Helper()
	layout, err := a.p.layout.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := syscall.Dup(a.p.mem.FD())
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memfd")
	defer f.Close()
	return startChild(t, engineEnv, engineConfig{Socket: socket, ID: a.p.id, Peer: a.addr, Ticket: a.ticket, Tokens: a.tokens, Blocks: a.from, Layout: layout}, f)
}

// bindFor binds what P, elsewhere, presented.
func (a *attempt) bindFor() {
	a.t.Helper()
	a.d.until(a.nonce, transfer.EventPresented)
	var err error
	if a.dLease, err = a.d.Bind(a.t.Context(), a.bindReq()); err != nil {
		a.t.Fatal(err)
	}
}

// hold pauses a daemon before it sends its next piece, and release lets it go on.
func hold(t *testing.T, admin string) {
	t.Helper()
	post(t, admin, "/debug/pause?point=write.frame&after=3")
	t.Cleanup(func() {
		if res, err := http.Post("http://"+admin+"/debug/release", "", nil); err == nil {
			_ = res.Body.Close()
		}
	})
}

func post(t *testing.T, admin, path string) {
	t.Helper()
	res, err := http.Post("http://"+admin+path, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s", path, res.Status)
	}
}

func TestKilledDaemon(t *testing.T) {
	a, _ := startNodeProcess(t, nodeConfig{NodeID: "node-a", Transport: "tcp"})
	cfg := nodeConfig{NodeID: "node-b", Transport: "tcp", Dir: t.TempDir()}
	b, process := startNodeProcess(t, cfg)
	p, d := newEngine(t, a.Socket, "p", wideLayout()), newEngine(t, b.Socket, "d", wideLayout())
	at := newAttempt(p, d)
	at.bind()
	hold(t, a.Admin)
	at.push(1)
	start, stalled := time.Now(), stall.Watch(t)
	process.kill()
	p.until(at.nonce, transfer.EventEnded)
	<-d.Done()
	if err := d.PeerGone(t.Context()); err != nil {
		t.Errorf("wait for the daemon's process: %v", err)
	}
	if took := time.Since(start); took > 5*time.Second+stalled() {
		t.Errorf("noticed after %v", took)
	}
	post(t, a.Admin, "/debug/release")
	again, _ := startNodeProcess(t, cfg)
	if again.Epoch == b.Epoch {
		t.Error("the new daemon has the dead one's epoch")
	}
	d = attachEngine(t, again.Socket, "d", wideLayout(), d.mem)
	next := newAttempt(p, d)
	next.bind()
	next.push(1)
	p.until(next.nonce, transfer.EventPushed)
}

func TestStoppedDaemon(t *testing.T) {
	a, _ := startNodeProcess(t, nodeConfig{NodeID: "node-a", Transport: "tcp", Silence: prompt})
	b, process := startNodeProcess(t, nodeConfig{NodeID: "node-b", Transport: "tcp", Silence: prompt})
	p, d := newEngine(t, a.Socket, "p", wideLayout()), newEngine(t, b.Socket, "d", wideLayout())
	at := newAttempt(p, d)
	at.bind()
	start, stalled := time.Now(), stall.Watch(t)
	process.signal(syscall.SIGSTOP)
	<-d.Done()
	p.until(at.nonce, transfer.EventEnded)
	if took := time.Since(start); took > 5*time.Second+stalled() {
		t.Errorf("noticed after %v", took)
	}
	if err := d.Err(); !contains(err, "silent") {
		t.Errorf("D hears: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := d.PeerGone(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a stopped daemon counts as gone: %v", err)
	}
	process.signal(syscall.SIGCONT)
	// That the same process takes the engine back says that it has fenced what was before.
	d = attachEngine(t, b.Socket, "d", wideLayout(), d.mem)
	next := newAttempt(p, d)
	next.bind()
	next.push(1)
	p.until(next.nonce, transfer.EventPushed)
}

func TestStoppedEngine(t *testing.T) {
	a, _ := startNodeProcess(t, nodeConfig{NodeID: "node-a", Transport: "tcp"})
	b, _ := startNodeProcess(t, nodeConfig{NodeID: "node-b", Transport: "tcp"})
	d := newEngine(t, b.Socket, "d", wideLayout())
	at := remoteAttempt(t, "node-a", d)
	process := startEngineProcess(t, a.Socket, at)
	hold(t, a.Admin)
	at.bindFor()
	if got := string(process.line()); got != "pushed\n" {
		t.Fatalf("engine says %q", got)
	}
	start, stalled := time.Now(), stall.Watch(t)
	process.signal(syscall.SIGSTOP)
	d.until(at.nonce, transfer.EventEnded)
	if took := time.Since(start); took > 5*time.Second+stalled() {
		t.Errorf("noticed after %v", took)
	}
}

// remoteAttempt is an attempt whose P is to be started as a process. Its memory is here too.
func remoteAttempt(t *testing.T, pNode string, d *engine) *attempt {
	t.Helper()
	mem, err := memfd.Create("p", layoutSize(wideLayout()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mem.Close() })
	return newRemoteAttempt(&engine{t: t, id: "p", layout: wideLayout(), mem: mem}, pNode, d)
}
