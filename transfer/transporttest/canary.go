package transporttest

import (
	"bytes"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

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

// suiteRounds is half of it in an emulated machine, where the suite is run for several ways to move bytes.
func suiteRounds() int {
	n := canaryRounds()
	if os.Getenv("HEADRACE_LAB") != "" && os.Getenv("HEADRACE_FULL") == "" {
		n /= 2
	}
	return n
}

// testCanary cancels transfers at random moments from either side and overwrites the blocks at once, at each end as soon as
// that end was told that it may. It is the proof of the fence: no byte may land in a block after its fence, and no byte of
// a source block that was overwritten after its fence may be seen anywhere.
func testCanary(t *testing.T, f Factory) { canaries(t, f, Options{}, suiteRounds()) }

// testCanaryChecksums is the same where both ends read every piece once more.
func testCanaryChecksums(t *testing.T, f Factory) {
	canaries(t, f, Options{Config: func(c *transfer.Config) { c.Checksum = transfer.ChecksumAlways }}, suiteRounds())
}

// testCanaryShards is the same with 2 source and 4 destination regions: the fence covers all of them.
func testCanaryShards(t *testing.T, f Factory) {
	src, dst := DefaultShape, DefaultShape
	src.Shards, dst.Shards, dst.BlockTokens, dst.Blocks = 2, 4, 64, 16
	canaries(t, f, Options{P: src, D: dst}, suiteRounds()/2)
}

// ForcedCanaries is the same for a one-sided transport whose fences are made by force: the other end is given no time to
// agree. That takes lanes down, and channels with them.
func ForcedCanaries(t *testing.T, f Factory) {
	suite := f.Config
	f.Config = func(c *transfer.Config) {
		if suite != nil {
			suite(c)
		}
		c.FenceGrace = time.Nanosecond
	}
	c := canaryRun{rounds: canaryRounds() / 2, before: (*Pair).reopen}
	c.run(t, f, Options{})
	if c.forced == 0 {
		t.Error("no fence was made by force: the test shows nothing")
	}
}

// revokeTurns is how often somebody has to be woken for a revoke, one after the other: the engine's loop, the completions' reader, the
// other end's two, and the waiter for the event.
const revokeTurns = 5

// Cancels cancels transfers in flight and wants every block back within a time, at both ends: from the call that revokes to
// the event that gives the blocks back. It says how long that took. One in fifty may be later, and of three runs one must keep
// to that: other programs run on the host of an emulated machine, and what is late by itself is late in all three. How late the
// machine wakes who waits is measured meanwhile, and given to each of the turns that a revoke takes.
func Cancels(t *testing.T, f Factory, within time.Duration) {
	for try := 1; ; try++ {
		c := canaryRun{rounds: canaryRounds(), cancels: canaryRounds(), before: (*Pair).reopen}
		stop := wakes()
		c.run(t, f, Options{})
		late := stop()
		t.Logf("of those who waited for a time, one in fifty was woken more than %v late", late.Round(10*time.Microsecond))
		within := within + revokeTurns*late
		near, far := judgeLate(t, "the end that revokes", c.near, within), judgeLate(t, "the other end", c.far, within)
		if near && far || t.Failed() {
			return
		}
		if try == 3 {
			t.Errorf("in %d of %d runs more than one in fifty came back later than after %v, the last one", try, try, within)
			return
		}
	}
}

// judgeLate tells whether at most one in fifty took longer than within.
func judgeLate(t *testing.T, who string, took []time.Duration, within time.Duration) bool {
	t.Helper()
	if len(took) == 0 {
		t.Errorf("no block came back at %s", who)
		return false
	}
	slices.Sort(took)
	at := func(q float64) time.Duration {
		return took[int(q*float64(len(took)-1))].Round(10 * time.Microsecond)
	}
	late := 0
	for _, d := range took {
		if d > within {
			late++
		}
	}
	t.Logf("blocks came back at %s after p50 %v, p90 %v, p99 %v, max %v; %d of %d later than %v", who, at(0.5), at(0.9), at(0.99), at(1), late, len(took), within)
	return late*50 <= len(took)
}

// reopen makes requests until one settles, and gives the blocks that they used: a ticket that is presented on a channel
// that is about to die is lost with it.
func (p *Pair) reopen(t *testing.T, r *rand.Rand) (used []uint32) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		q := p.NewRequest(r, 64, 0, patience)
		used = append(used, q.Dst...)
		if q.try(t) {
			return used
		}
	}
	t.Fatalf("nothing settles any more within %v", patience)
	return nil
}

// try runs one transfer and reports whether it settled.
func (q *Request) try(t *testing.T) (settled bool) {
	t.Helper()
	p, nonce := q.Pair, q.Ticket.Nonce
	var err error
	if q.PLease, err = p.P.Client.Present(transfer.PresentReq{Ticket: q.Raw, Peer: p.Addr, Regions: p.P.Regions, Tokens: q.Tokens, Blocks: q.Src}); err != nil {
		return false
	}
	if !q.bindInTime() {
		return false
	}
	for layer := range p.P.Layout.Layers {
		if p.P.Client.Push(q.PLease, []transfer.Unit{{Layer: layer, Count: uint32(len(q.Src))}}, uint64(layer)+1) != nil {
			break
		}
	}
	if err := p.P.Client.Handoff(q.PLease, nil); err != nil {
		t.Logf("a lease that only was to show that the channel lives ended: %v", err)
	}
	settled = p.D.End(t, nonce).Kind == transfer.EventSettled
	return p.P.End(t, nonce).Kind == transfer.EventSettled && settled
}

func canaries(t *testing.T, f Factory, o Options, rounds int) {
	c := canaryRun{rounds: rounds, before: func(*Pair, *testing.T, *rand.Rand) []uint32 { return nil }}
	c.run(t, f, o)
}

// canaryRun is rounds of cancels, each of which begins with before, and what came of them.
type canaryRun struct {
	rounds    int
	cancels   int // at least so many of them are to come in flight, if twice the rounds are enough for that; a quarter in any case
	before    func(*Pair, *testing.T, *rand.Rand) []uint32
	forced    uint64          // fences made by force
	near, far []time.Duration // from the call that revokes to the end of the lease, at this end and at the other
}

func (c *canaryRun) run(t *testing.T, f Factory, o Options) {
	defer CheckLeaks(t)()
	r := NewRand()
	p := NewPair(t, f, o)
	var cancelled, settled int
	var earlier []*Request // fenced: their blocks must keep their canaries until they are used again
	for i := 0; i < c.rounds || cancelled < c.cancels && i < 2*c.rounds || fewInFlight(cancelled, i, c.rounds); i++ {
		earlier = withoutBlocks(earlier, c.before(p, t, r))
		q := p.NewRequest(r, uint32(200+r.IntN(300)), 0, patience)
		earlier = withoutBlocks(earlier, q.Dst)
		if c.cancelAtRandom(t, r, f, q) {
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
	c.forced = p.P.Engine.Status().Totals.FencesForced + p.D.Engine.Status().Totals.FencesForced
	t.Logf("%d cancelled in flight, %d settled before the cancel came, %d fences by force", cancelled, settled, c.forced)
	if cancelled < c.rounds/4 {
		t.Errorf("only %d of %d rounds were cancelled in flight: the test shows little", cancelled, c.rounds)
	}
	p.Close(t)
}

// fewInFlight tells whether another round is due behind done of them: how many transfers are still in flight when their cancel
// comes is a matter of the machine, and a quarter of the rounds must be.
func fewInFlight(cancelled, done, rounds int) bool { return cancelled < rounds/4 && done < 8*rounds }

// note keeps how long the blocks of a lease that did not settle took to come back.
func (c *canaryRun) note(t *testing.T, q *Request, began time.Time, near, far *Side) {
	for _, s := range []*Side{near, far} {
		if evs := s.Events(q.Ticket.Nonce); len(evs) > 0 && evs[len(evs)-1].Reason != "canary" {
			t.Logf("%s: %s", s.ID, describe(evs))
			return
		}
	}
	if at := near.ended(q.Ticket.Nonce); !at.IsZero() {
		c.near = append(c.near, at.Sub(began))
	}
	if at := far.ended(q.Ticket.Nonce); !at.IsZero() {
		c.far = append(c.far, at.Sub(began))
	}
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
func (c *canaryRun) cancelAtRandom(t *testing.T, r *rand.Rand, f Factory, q *Request) (settled bool) {
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
	began := time.Now()
	if r.IntN(2) == 0 {
		defer func() { c.note(t, q, began, p.P, p.D) }()
		p.P.Client.Revoke(q.PLease, "canary")
		// P is fenced now, whatever D does: its blocks are its own again.
		settledAtP := p.P.End(t, q.Ticket.Nonce).Kind == transfer.EventSettled
		if !settledAtP {
			p.P.set(q.Src, canarySource)
		}
		return finishTarget(t, q, settledAtP)
	}
	defer func() { c.note(t, q, began, p.D, p.P) }()
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
func checkOnly(t testing.TB, s *Side, blocks []uint32, want byte, what string) {
	t.Helper()
	s.eachBlock(blocks, func(b []byte) {
		// A sequence of equal bytes equals itself shifted by one.
		if b[0] != want || !bytes.Equal(b[1:], b[:len(b)-1]) {
			t.Fatal(what)
		}
	})
}
