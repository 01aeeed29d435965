package node_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
	"github.com/headrace/headrace/transfer/node/nodeclient"
)

// What the memory is overwritten with right after a fence. Iterations' own patterns stay below.
const (
	canarySource = 0xcc // never to be seen at D: read from the source after the fence
	canaryTarget = 0xdd // to stay at D: overwritten means written after the fence
	patterns     = 0x80
)

// cancels is how often each canary test cancels.
func cancels(t *testing.T) int {
	switch {
	case os.Getenv("HEADRACE_FULL") != "":
		return 1000
	case testing.Short():
		return 10
	}
	t.Log("HEADRACE_FULL=1 cancels 1,000 times")
	return 100
}

// processPair is daemons in processes of their own, with D's engine here, or one daemon for the local copy.
func processPair(t *testing.T, transport string) (a, b node.Ready, d *engine) {
	t.Helper()
	a, _ = startNodeProcess(t, nodeConfig{NodeID: "node-a", Transport: transport})
	b = a
	if transport == "tcp" {
		b, _ = startNodeProcess(t, nodeConfig{NodeID: "node-b", Transport: transport})
	}
	return a, b, newEngine(t, b.Socket, "d", wideLayout())
}

// landed waits until the transfer is in its middle: a block drawn by lot has changed at D.
func landed(t *testing.T, a *attempt, rng *rand.Rand) {
	t.Helper()
	b := block(a.d, 0, a.to[rng.IntN(len(a.to))])
	eventually(t, "a block to land", func() bool { return b[0] != canaryTarget })
}

// slow limits the rate, after a first quarter of the cancels at full speed. A tenth of a second's bytes may be saved up
// while nothing moves.
func slow(t *testing.T, a node.Ready, i, n, rate int) {
	t.Helper()
	if i == n/4 {
		post(t, a.Admin, fmt.Sprintf("/debug/rate?bytes_per_s=%d", rate))
	}
}

// prepare gives the iteration a pattern of its own and D a clean slate.
func prepare(a *attempt, i int) byte {
	v := byte(1 + i%(patterns-1))
	fill(a.p.mem.Bytes(), v)
	fill(a.d.mem.Bytes(), canaryTarget)
	return v
}

// checkD holds that D has only this iteration's bytes, clean slate, and what fills up a piece that was broken off.
func checkD(t *testing.T, a *attempt, i int, v byte) {
	t.Helper()
	const filler = 0
	m := a.d.mem.Bytes()
	if count(m, v)+count(m, canaryTarget)+count(m, filler) == len(m) {
		return
	}
	for at, b := range m {
		if b != v && b != canaryTarget && b != filler {
			t.Fatalf("cancel %d: byte %d at D is %#x: neither this transfer's %#x nor untouched (%#x is the source after its fence)", i, at, b, v, canarySource)
		}
	}
}

func count(m []byte, v byte) int { return bytes.Count(m, []byte{v}) }

// checkClean holds that nothing landed at D since it was overwritten.
func checkClean(t *testing.T, d *engine, i int) {
	t.Helper()
	m := d.mem.Bytes()
	if count(m, canaryTarget) == len(m) {
		return
	}
	for at, b := range m {
		if b != canaryTarget {
			t.Fatalf("cancel %d: byte %d at D became %#x after the fence", i, at, b)
		}
	}
}

// middles counts how many cancels hit a transfer in its middle, which is what the tests are about.
type middles struct{ hit, all int }

func (m *middles) look(d *engine, v byte) {
	m.all++
	if n := count(d.mem.Bytes(), v); n > 0 && n < len(d.mem.Bytes()) {
		m.hit++
	}
}

func (m *middles) enough(t *testing.T) {
	t.Helper()
	t.Logf("%d of %d cancels came in the middle of the transfer", m.hit, m.all)
	if m.all >= 20 && m.hit*10 < m.all {
		t.Error("too few to say anything")
	}
}

// midway begins iteration i's transfer and, two times of three, waits until some of it has landed. v is its pattern.
func midway(t *testing.T, p, d *engine, i int, rng *rand.Rand) (at *attempt, v byte) {
	t.Helper()
	at = newAttempt(p, d)
	v = prepare(at, i)
	at.bind()
	at.push(1)
	if i%3 != 0 {
		landed(t, at, rng)
	}
	return at, v
}

func TestFenceCancelledByP(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			a, _, d := processPair(t, transport)
			p := newEngine(t, a.Socket, "p", wideLayout())
			var mid middles
			rng := rand.New(rand.NewPCG(1, 2))
			n := cancels(t)
			for i := range n {
				slow(t, a, i, n, 500e6)
				at, v := midway(t, p, d, i, rng)
				revoke(t, p, at.pLease)
				fill(p.mem.Bytes(), canarySource)
				ended(d, at)
				mid.look(d, v)
				checkD(t, at, i, v)
				fill(d.mem.Bytes(), canaryTarget)
				ended(p, at)
				checkClean(t, d, i)
			}
			mid.enough(t)
		})
	}
}

func TestFenceCancelledByD(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			a, _, d := processPair(t, transport)
			p := newEngine(t, a.Socket, "p", wideLayout())
			var mid middles
			rng := rand.New(rand.NewPCG(3, 4))
			n := cancels(t)
			for i := range n {
				slow(t, a, i, n, 500e6)
				at, v := midway(t, p, d, i, rng)
				revoke(t, d, at.dLease)
				mid.look(d, v)
				fill(d.mem.Bytes(), canaryTarget)
				ended(p, at)
				fill(p.mem.Bytes(), canarySource)
				ended(d, at)
				checkClean(t, d, i)
			}
			mid.enough(t)
		})
	}
}

// P's engine is killed. That a successor may attach says that its leases are fenced: the source may be overwritten.
func TestFenceKilledP(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			a, _, d := processPair(t, transport)
			var mid middles
			rng := rand.New(rand.NewPCG(5, 6))
			n := max(cancels(t)/5, 3)
			for i := range n {
				slow(t, a, i, n, 100e6)
				at := remoteAttempt(t, "node-a", d)
				v := prepare(at, i)
				process := startEngineProcess(t, a.Socket, at)
				at.bindFor()
				if i%3 != 0 {
					landed(t, at, rng)
				}
				process.kill()
				successor, err := nodeclient.Dial(t.Context(), a.Socket, nodeclient.Options{EngineID: "p"})
				if err != nil {
					t.Fatal(err)
				}
				fill(at.p.mem.Bytes(), canarySource)
				ended(d, at)
				mid.look(d, v)
				checkD(t, at, i, v)
				fill(d.mem.Bytes(), canaryTarget)
				if err := successor.Close(); err != nil {
					t.Fatal(err)
				}
				_ = at.p.mem.Close()
				checkClean(t, d, i)
			}
			mid.enough(t)
		})
	}
}

func revoke(t *testing.T, e *engine, id transfer.LeaseID) {
	t.Helper()
	err := e.Revoke(t.Context(), id, "cancelled")
	if err != nil && !errors.Is(err, transfer.ErrLeaseEnded) && !errors.Is(err, transfer.ErrUnknownLease) {
		t.Fatal(err)
	}
}

// ended waits for the lease's end.
func ended(e *engine, a *attempt) { e.until(a.nonce, transfer.EventEnded) }
