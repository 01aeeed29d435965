package transporttest

import (
	"bytes"
	"net/rpc"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
)

// Machines are both machines as the driver sees them.
type Machines [2]*Machine

// Machine carries out orders. An order that cannot be carried out ends the test.
type Machine struct {
	t    testing.TB
	rpc  *rpc.Client
	Addr string // of its daemon
}

func call[R any](m *Machine, method string, arg any) (r R) {
	m.t.Helper()
	if err := m.rpc.Call("Agent."+method, arg, &r); err != nil {
		m.t.Fatalf("%s: %v", method, err)
	}
	return r
}

// In makes the machines report to a subtest while that runs.
func (m *Machines) In(t *testing.T) {
	outer := m[0].t
	m[0].t, m[1].t = t, t
	t.Cleanup(func() { m[0].t, m[1].t = outer, outer })
}

// Start starts a daemon with engines in both machines, in place of those before.
func (m *Machines) Start(o StartOrder) {
	m[0].t.Helper()
	m[0].Start(o)
	m[1].Start(o)
}

// Start starts a daemon with engines in this machine, in place of the one before.
func (m *Machine) Start(o StartOrder) {
	m.t.Helper()
	m.Addr = call[string](m, "Start", o)
}

// Stop ends the daemon.
func (m *Machine) Stop() { m.t.Helper(); call[bool](m, "Stop", 0) }

// Do has the machine do what Twin.Do names so.
func (m *Machine) Do(name string) { m.t.Helper(); call[bool](m, "Do", name) }

// Status gives the daemon's status.
func (m *Machine) Status() transfer.Status {
	m.t.Helper()
	return call[transfer.Status](m, "Status", 0)
}

// Flight is a transfer between the machines.
type Flight struct {
	From, To *Machine
	Sent     Sent
	Nonce    [16]byte
	record   []byte
}

// Send presents and pushes a transfer from one machine to the other.
func (m *Machines) Send(from int, o SendOrder) *Flight {
	m[0].t.Helper()
	f := &Flight{From: m[from], To: m[1-from], record: o.Record}
	if o.Life == 0 {
		o.Life = patience
	}
	o.Addr = f.To.Addr
	f.Sent = call[Sent](f.From, "Send", o)
	tk, err := ticket.Decode(f.Sent.Raw)
	if err != nil {
		m[0].t.Fatal(err)
	}
	f.Nonce = tk.Nonce
	return f
}

// Bind binds it at the other machine.
func (f *Flight) Bind() { f.To.t.Helper(); call[bool](f.To, "Bind", f.Sent) }

// Settled waits for both ends, and compares what landed with what was sent.
func (f *Flight) Settled() {
	t := f.From.t
	t.Helper()
	d, p := call[Ended](f.To, "End", f.Nonce), call[Ended](f.From, "End", f.Nonce)
	if d.Kind != transfer.EventSettled || p.Kind != transfer.EventSettled {
		t.Fatalf("ended with %v (%q) at D and %v (%q) at P, want settled", d.Kind, d.Reason, p.Kind, p.Reason)
	}
	if !bytes.Equal(d.Record, f.record) {
		t.Errorf("record is %d bytes, want %d", len(d.Record), len(f.record))
	}
	call[bool](f.To, "Check", f.Nonce)
}

// Carry makes a whole transfer and gives how long it took from the first order to the last byte.
func (m *Machines) Carry(from int, o SendOrder) time.Duration {
	m[0].t.Helper()
	began := time.Now()
	f := m.Send(from, o)
	f.Bind()
	d := call[Ended](f.To, "End", f.Nonce)
	took := time.Since(began)
	if d.Kind != transfer.EventSettled {
		m[0].t.Fatalf("ended with %v at D: %q", d.Kind, d.Reason)
	}
	f.Settled()
	return took
}
