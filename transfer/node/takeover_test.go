package node_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
	"github.com/headrace/headrace/transfer/node/wire"
)

// exited waits for a daemon's process and says how it went.
func exited(t *testing.T, what string, c *child) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- c.wait() }()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	case <-time.After(15 * time.Second):
		t.Fatalf("%s does not end", what)
	}
}

// over waits until the engine's daemon gives way, and attaches its memory to the successor too.
func (e *engine) over(socket string) *engine {
	e.t.Helper()
	select {
	case <-e.Draining():
	case <-time.After(15 * time.Second):
		e.t.Fatalf("%s is not told that its daemon gives way", e.id)
	}
	return attachEngine(e.t, socket, e.id, e.layout, e.mem)
}

// part leaves only some blocks of the request.
func (a *attempt) part(from, to int) {
	a.from, a.to, a.tokens = a.from[from:to], a.to[from:to], uint32(to-from)*a.p.layout.BlockTokens
}

func (a *attempt) finish(record string) {
	a.t.Helper()
	if err := a.p.Handoff(a.t.Context(), a.pLease, []byte(record)); err != nil {
		a.t.Fatal(err)
	}
	if ev := a.d.until(a.nonce, transfer.EventSettled); string(ev.Record) != record {
		a.t.Errorf("record %q, want %q", ev.Record, record)
	}
	a.p.until(a.nonce, transfer.EventSettled)
	for i, from := range a.from {
		if want, got := block(a.p, 0, from), block(a.d, 0, a.to[i]); string(want) != string(got) {
			a.t.Fatalf("block %d differs", i)
		}
	}
}

// A transfer in its middle ends at the old daemons, the next one is served by the new ones, and nobody sees more.
func TestTakeOverInATransfer(t *testing.T) {
	for _, who := range []string{"source", "target", "both", "one daemon"} {
		t.Run(who, func(t *testing.T) {
			t.Parallel()
			cfgA := nodeConfig{NodeID: "node-a", Transport: "auto", Dir: t.TempDir()}
			cfgB := nodeConfig{NodeID: "node-b", Transport: "auto", Dir: t.TempDir()}
			a, procA := startNodeProcess(t, cfgA)
			b, procB := a, procA
			point := "copy.piece"
			if who != "one daemon" {
				b, procB = startNodeProcess(t, cfgB)
				point = "write.frame"
			}
			p, d := newEngine(t, a.Socket, "p", wideLayout()), newEngine(t, b.Socket, "d", wideLayout())
			pattern(p, 5)
			at := newAttempt(p, d)
			at.part(0, 128)
			at.bind()
			post(t, a.Admin, "/debug/pause?point="+point+"&after=3")
			at.push(1)
			p2, d2, admin := p, d, a.Admin
			if who != "target" {
				next := replaceNode(t, a, &cfgA)
				p2, admin = p.over(next.Socket), next.Admin
				if who == "one daemon" {
					d2 = d.over(next.Socket)
				}
			}
			if who == "target" || who == "both" {
				d2 = d.over(replaceNode(t, b, &cfgB).Socket)
			}
			// New work goes through the new daemons while the old transfer stands still.
			next := newAttempt(p2, d2)
			next.part(128, 256)
			next.bind()
			if who == "target" { // the pause is P's daemon's, which stays
				post(t, admin, "/debug/release")
			}
			next.push(1)
			next.finish("second")
			if who != "target" {
				post(t, draining(t, admin), "/debug/release")
			}
			p.until(at.nonce, transfer.EventPushed)
			at.finish("first")
			if p2 != p {
				_ = p.Close()
				if who == "one daemon" {
					_ = d.Close()
				}
				exited(t, "P's old daemon", procA)
			}
			if who == "target" || who == "both" {
				_ = d.Close()
				exited(t, "D's old daemon", procB)
			}
			last := newAttempt(p2, d2)
			last.bind()
			last.push(1)
			last.finish("third")
		})
	}
}

// replaceNode starts a successor and checks that it is at the same places.
func replaceNode(t *testing.T, old node.Ready, cfg *nodeConfig) node.Ready {
	t.Helper()
	cfg.Takeover = true
	next, proc := startNodeProcess(t, *cfg)
	if next.Epoch == old.Epoch || next.DataAddr != old.DataAddr || next.Admin != old.Admin || next.Socket != old.Socket {
		t.Errorf("%+v took over from %+v", next, old)
	}
	c := newEngine(t, next.Socket, "probe", testLayout())
	if got := c.Info().PID; got != proc.cmd.Process.Pid || got != next.PID {
		t.Errorf("engines take process %d for the new daemon, it is %d", got, proc.cmd.Process.Pid)
	}
	_ = c.Close()
	return next
}

func statusOf(t *testing.T, admin string) (st node.Status) {
	t.Helper()
	res, err := http.Get("http://" + admin + "/status")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(&st); err != nil {
		t.Fatal(err)
	}
	return st
}

// draining gives the admin address of the daemon that drains beside another.
func draining(t *testing.T, of string) (admin string) {
	t.Helper()
	eventually(t, "the draining daemon is shown", func() bool {
		st := statusOf(t, of)
		if st.Predecessor == nil {
			return false
		}
		admin = st.Predecessor.Admin
		return admin != ""
	})
	return admin
}

// A daemon that gives way takes no ticket any more; an engine and a peer that come with one are sent on.
func TestTakeOverSendsNewTicketsOn(t *testing.T) {
	cfg := nodeConfig{NodeID: "node-b", Transport: "tcp", Dir: t.TempDir()}
	a, _ := startNodeProcess(t, nodeConfig{NodeID: "node-a", Transport: "tcp"})
	b, proc := startNodeProcess(t, cfg)
	p, d := newEngine(t, a.Socket, "p", wideLayout()), newEngine(t, b.Socket, "d", wideLayout())
	used := newAttempt(p, d)
	used.bind() // and opens the channel
	given := newAttempt(p, d)
	if err := d.Refuse(t.Context(), given.ticket, "changed its mind"); err != nil {
		t.Fatal(err)
	}
	next := replaceNode(t, b, &cfg)
	d2 := d.over(next.Socket)
	own := newAttempt(d, p)
	if _, err := d.Present(t.Context(), own.presentReq()); !errors.Is(err, transfer.ErrDraining) {
		t.Errorf("a new ticket at the old daemon: %v", err)
	}
	at := newAttempt(p, d2)
	at.bind() // over a new channel, to the new daemon
	at.push(1)
	at.finish("x")
	for what, again := range map[string]*attempt{"used": used, "given up": given} {
		if what == "used" {
			if err := p.RevokeTicket(t.Context(), again.nonce, "to present it again"); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := p.Present(t.Context(), again.presentReq()); err != nil {
			t.Fatal(err)
		}
		if ev := refusal(t, p, again.nonce); !strings.Contains(ev.Reason, "used already") {
			t.Errorf("a ticket %s at the old daemon, at the new one: %s %s", what, ev.Kind, ev.Reason)
		}
	}
	_ = d.Close()
	exited(t, "the old daemon", proc)
}

// refusal waits for REFUSED, passing over the end of an earlier attempt with the same ticket.
func refusal(t *testing.T, e *engine, nonce [16]byte) transfer.Event {
	t.Helper()
	timeout := time.After(15 * time.Second)
	for {
		select {
		case ev := <-e.of(nonce):
			if ev.Kind == transfer.EventRefused {
				return ev
			}
		case <-timeout:
			t.Fatal("it is not refused")
		}
	}
}

// A successor that cannot take over leaves everything as it was, before and after the cut.
func TestTakeOverFails(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	cfg := nodeConfig{NodeID: "node-a", Transport: "tcp", Dir: t.TempDir()}
	r, proc := startNodeProcess(t, cfg)
	p, d := newEngine(t, r.Socket, "p", wideLayout()), newEngine(t, r.Socket, "d", wideLayout())
	pattern(p, 1)
	works(t, p, d)
	for what, edit := range map[string]func(*nodeConfig){
		"the admin port is taken": func(c *nodeConfig) { c.Admin = taken.Addr().String() },
		"another transport":       func(c *nodeConfig) { c.Transport = "none" },
	} {
		bad := cfg
		bad.Takeover = true
		edit(&bad)
		c := startChild(t, nodeEnv, bad)
		if c.wait() == nil {
			t.Errorf("%s: the successor ended well", what)
		}
		eventually(t, "the running daemon takes the cut back", func() bool { return !statusOf(t, r.Admin).Draining })
		works(t, p, d)
		fresh := newEngine(t, r.Socket, "fresh", testLayout())
		if fresh.Info().PID != proc.cmd.Process.Pid {
			t.Errorf("%s: the daemon is process %d now", what, fresh.Info().PID)
		}
		_ = fresh.Close()
	}
	select {
	case <-p.Draining():
		t.Error("an engine was told to go over")
	default:
	}
}

// An engine that does not understand is ended with the drain, and a successor that dies can be replaced at once.
func TestTakeOverTimesOut(t *testing.T) {
	cfg := nodeConfig{NodeID: "node-a", Transport: "shm", Dir: t.TempDir(), DrainTimeout: time.Second}
	r, proc := startNodeProcess(t, cfg)
	stays := newEngine(t, r.Socket, "stays", testLayout())
	next := cfg
	next.Takeover = true
	_, proc2 := startNodeProcess(t, next)
	<-stays.Draining()
	proc2.kill()
	third, _ := startNodeProcess(t, cfg) // not even a take-over: the place is free
	newEngine(t, third.Socket, "stays", testLayout())
	<-stays.Done()
	if err := stays.Err(); !contains(err, "stopping") {
		t.Errorf("the engine that stayed hears: %v", err)
	}
	exited(t, "the old daemon", proc)
}

// An engine, and a rank of it, of which nothing is left and which do not read their sockets, as an engine that only looks when it
// has work: the old daemon does not wait for them. It does for those with a lease.
func TestTakeOverDoesNotWaitForTheIdle(t *testing.T) {
	cfg := nodeConfig{NodeID: "node-a", Transport: "shm", Dir: t.TempDir()} // drains for a minute
	r, proc := startNodeProcess(t, cfg)
	engine, rank := rawDial(t, r.Socket), rawDial(t, r.Socket)
	engine.hello("idle", wire.VersionMin, wire.VersionMax)
	rank.hello("idle/0", wire.VersionMin, wire.VersionMax)
	p, d := newEngine(t, r.Socket, "p", wideLayout()), newEngine(t, r.Socket, "d", wideLayout())
	at := newAttempt(p, d)
	at.bind()
	next := cfg
	next.Takeover = true
	startNodeProcess(t, next)
	for _, c := range []*rawConn{engine, rank} {
		c.expect(wire.TypeHelloOK)
		c.expect(wire.TypeDraining)
		if m := c.expect(wire.TypeGoodbye).(wire.Event); wire.Code(m.Code) != wire.CodeDraining || !strings.Contains(m.Text, "connect again") {
			t.Errorf("good-bye: %+v", m)
		}
	}
	at.push(1) // that lease goes on
	at.finish("x")
	<-p.Done() // by then these have nothing either
	<-d.Done()
	if err := p.Err(); !errors.Is(err, transfer.ErrDraining) {
		t.Errorf("P hears: %v", err)
	}
	exited(t, "the old daemon", proc)
}

func TestTakeOverOfNobody(t *testing.T) {
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "shm", Takeover: true})
	newEngine(t, r.Socket, "e", testLayout())
	for _, name := range []string{r.Socket, r.Socket + ".ctl"} {
		if st, err := os.Stat(name); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", name, st, err)
		}
	}
}

// Ten in a row, with transfers all the time: none fails, descriptors do not pile up.
func TestTakeOverTenTimes(t *testing.T) {
	cfg := nodeConfig{NodeID: "node-a", Transport: "tcp", Dir: t.TempDir()}
	r, proc := startNodeProcess(t, cfg)
	p, d := newEngine(t, r.Socket, "p", testLayout()), newEngine(t, r.Socket, "d", testLayout())
	var fds []int
	for range 10 {
		cfg.Takeover = true
		at := newAttempt(p, d)
		at.bind()
		next, nextProc := startNodeProcess(t, cfg)
		p2, d2 := p.over(next.Socket), d.over(next.Socket)
		at.push(1) // at the old one
		p.until(at.nonce, transfer.EventPushed)
		if err := p.Revoke(t.Context(), at.pLease, "enough"); err != nil && !errors.Is(err, transfer.ErrLeaseEnded) {
			t.Fatal(err)
		}
		_, _ = p.Close(), d.Close()
		exited(t, "an old daemon", proc)
		p, d, proc = p2, d2, nextProc
		fds = append(fds, openFilesOf(t, proc.cmd.Process.Pid))
	}
	if fds[9] > fds[2]+4 {
		t.Errorf("open files of one daemon after another: %v", fds)
	}
	proc.signal(syscall.SIGKILL)
}

func openFilesOf(t *testing.T, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
