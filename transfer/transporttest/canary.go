package transporttest

import (
	"bytes"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"

	"github.com/headrace/headrace/transfer"
)

// Canaries: the source holds bytes below 0x80 while it may be read, and canarySource afterwards; the destination's blocks
// hold canaryTarget once they are fenced.
const (
	canarySource = 0xee
	canaryTarget = 0xdd
)

// canaryRounds is 1,000 where HEADRACE_FULL is set (make proof), else 100.
func canaryRounds() int {
	if os.Getenv("HEADRACE_FULL") != "" {
		return 1000
	}
	if testing.Short() {
		return 30
	}
	return 100
}

// testCanary cancels transfers at random moments from either side and overwrites the blocks at once, at each end as soon as
// that end was told that it may. It is the proof of the fence: no byte may land in a block after its fence, and no byte of
// a source block that was overwritten after its fence may be seen anywhere.
func testCanary(t *testing.T, f Factory) { canaries(t, f, Options{}, canaryRounds()) }

// testCanaryChecksums is the same where both ends read every piece once more.
func testCanaryChecksums(t *testing.T, f Factory) {
	canaries(t, f, Options{Config: func(c *transfer.Config) { c.Checksum = transfer.ChecksumAlways }}, canaryRounds())
}

// testCanaryShards is the same with 2 source and 4 destination regions: the fence covers all of them.
func testCanaryShards(t *testing.T, f Factory) {
	src, dst := DefaultShape, DefaultShape
	src.Shards, dst.Shards, dst.BlockTokens, dst.Blocks = 2, 4, 64, 16
	canaries(t, f, Options{P: src, D: dst}, canaryRounds()/2)
}

func canaries(t *testing.T, f Factory, o Options, rounds int) {
	defer CheckLeaks(t)()
	r := NewRand()
	p := NewPair(t, f, o)
	var cancelled, settled int
	var earlier []*Request // fenced: their blocks must keep their canaries until they are used again
	for range rounds {
		q := p.NewRequest(r, uint32(200+r.IntN(300)), 0, patience)
		earlier = withoutBlocks(earlier, q.Dst)
		if cancelAtRandom(t, r, f, q) {
			settled++
			if err := q.CheckLanded(); err != nil {
				t.Fatal(err)
			}
		} else {
			cancelled++
			earlier = append(earlier, q)
		}
		for _, e := range earlier {
			checkOnly(t, p.D, e.Dst, canaryTarget, "a byte landed after the fence")
		}
	}
	t.Logf("%d cancelled in flight, %d settled before the cancel came", cancelled, settled)
	if cancelled < rounds/4 {
		t.Errorf("only %d of %d rounds were cancelled in flight: the test shows little", cancelled, rounds)
	}
	p.Close(t)
}

// withoutBlocks drops the requests of which a block is used again.
func withoutBlocks(qs []*Request, blocks []uint32) (out []*Request) {
	used := make(map[uint32]bool)
	for _, b := range blocks {
		used[b] = true
	}
	for _, q := range qs {
		var rest []uint32
		for _, b := range q.Dst {
			if !used[b] {
				rest = append(rest, b)
			}
		}
		if q.Dst = rest; len(rest) > 0 {
			out = append(out, q)
		}
	}
	return out
}

// cancelAtRandom runs one transfer and revokes it from one side. It reports whether the transfer settled all the same.
func cancelAtRandom(t *testing.T, r *rand.Rand, f Factory, q *Request) (settled bool) {
	p := q.Pair
	held := ""
	if r.IntN(3) == 0 { // hold it at a certain piece
		pauses, point := p.P.Pauses, transfer.PauseWriteFrame
		if f.ReadPause != "" && r.IntN(2) == 0 {
			pauses, point = p.D.Pauses, f.ReadPause
		}
		pauses.Set(point, r.IntN(6))
		held = point
		defer pauses.ReleaseAll()
	}
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, []byte("record"))
	if held != "" {
		waitHeldOrEnd(t, q, held)
	} else {
		for range r.IntN(20000) { // or let it run for a random while
			runtime.Gosched()
		}
	}
	if r.IntN(2) == 0 {
		p.P.Client.Revoke(q.PLease, "canary")
		// P is fenced now, whatever D does: its blocks are its own again.
		settledAtP := p.P.End(t, q.Ticket.Nonce).Kind == transfer.EventSettled
		if !settledAtP {
			p.P.set(q.Src, canarySource)
		}
		return finishTarget(t, q, settledAtP)
	}
	p.D.Client.Revoke(q.DLease, "canary")
	settled = finishTarget(t, q, false)
	if ev := p.P.End(t, q.Ticket.Nonce); ev.Kind == transfer.EventSettled && !settled {
		t.Fatal("settled at P and not at D")
	}
	return settled
}

// waitHeldOrEnd waits until the transfer is held at its pause, or went by it.
func waitHeldOrEnd(t *testing.T, q *Request, point string) {
	t.Helper()
	for {
		for _, pauses := range []*transfer.Pauses{q.Pair.P.Pauses, q.Pair.D.Pauses} {
			if pauses.Snapshot()[point] > 0 {
				return
			}
		}
		evs := q.Pair.P.Events(q.Ticket.Nonce)
		if k := evs[max(len(evs)-1, 0):]; len(k) > 0 && (k[0].Kind == transfer.EventSettled || k[0].Kind == transfer.EventEnded) {
			return
		}
		runtime.Gosched()
	}
}

// finishTarget waits for D's end. If D settled, every byte must be from before P's fence, wherever P is by now; if not, D's
// blocks are its own again.
func finishTarget(t *testing.T, q *Request, settledAtP bool) bool {
	t.Helper()
	p := q.Pair
	ev := p.D.End(t, q.Ticket.Nonce)
	p.D.eachBlock(q.Dst, func(b []byte) {
		if bytes.IndexByte(b, canarySource) >= 0 {
			t.Fatal("a source byte that was overwritten after the fence arrived")
		}
	})
	if ev.Kind != transfer.EventSettled {
		if settledAtP {
			t.Fatal("settled at P and not at D")
		}
		p.D.set(q.Dst, canaryTarget)
		return false
	}
	if !settledAtP {
		p.P.End(t, q.Ticket.Nonce)
		// P revoked after D had settled: what D has is right, but the source is gone. Compare with a fresh copy.
		return checkAgainstPattern(t, q)
	}
	return true
}

// checkAgainstPattern restores the source's pattern, so that the caller can compare.
func checkAgainstPattern(t *testing.T, q *Request) bool {
	t.Helper()
	q.FillSource(q.salt)
	return true
}

// checkOnly wants one byte value in all of the blocks.
func checkOnly(t *testing.T, s *Side, blocks []uint32, want byte, what string) {
	t.Helper()
	s.eachBlock(blocks, func(b []byte) {
		// A sequence of equal bytes equals itself shifted by one.
		if b[0] != want || !bytes.Equal(b[1:], b[:len(b)-1]) {
			t.Fatal(what)
		}
	})
}
