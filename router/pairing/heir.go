package pairing

import (
	"fmt"
	"slices"
)

// Leaving is a stream whose worker is to be left.
type Leaving struct {
	From *Worker
	// Left is how many tokens its answer may still have; 0: nobody knows.
	Left int64
	// Taken, when set, says why a worker cannot take one more stream over just now; "" if it can.
	Taken func(w *Worker) string
}

// heirOverhead is what a move takes beside its bytes, as in scheduler/scaledown, whose rule this is: with the time between tokens
// and the speed of the channel that this router knows in place of guesses.
const heirOverhead = 0.1

// Heir chooses who goes on with a stream: of those that fit its worker and have room for its KV cache, the one with the least cost of
// transfer and decode. r's PromptTokens are those of the prompt and of the answer so far. nil with the reason for nobody; busy tells
// that it is only because of those taken.
func Heir(r Request, l Leaving, v *View) (to *Worker, why string, busy bool) {
	others := learned(v)
	from := &Candidate{Worker: l.From}
	for i := range v.Workers {
		if v.Workers[i].ID == l.From.ID {
			from = &v.Workers[i]
		}
	}
	speeds := from.speeds(&others)
	wait := float64(l.Left) * (speeds.ITL + speeds.ITLStream*float64(from.Load.Decodes))
	best, bestLot := -1, 0.
	var bestCost, bestTransfer float64
	why = "nobody else fits that has room"
	for i := range v.Workers {
		c := &v.Workers[i]
		if !r.inherits(l.From, c, v) {
			continue
		}
		if l.Taken != nil {
			if taken := l.Taken(c.Worker); taken != "" {
				why, busy = taken, true
				continue
			}
		}
		way, known := v.channel(from, c)
		transfer := way.seconds(from, c, known, r.PromptTokens, 0)
		cost, lot := transfer+newSide(&r, c, &others).decodeTotal, draw(weightSeed, r.ID, c.ID)
		if best < 0 || cost < bestCost || cost == bestCost && lot < bestLot {
			best, bestCost, bestTransfer, bestLot = i, cost, transfer, lot
		}
	}
	switch {
	case best < 0:
		return nil, why, busy
	case l.Left > 0 && wait <= bestTransfer+heirOverhead:
		return nil, fmt.Sprintf("%d tokens are left at most: it ends where it is sooner than it is moved", l.Left), false
	}
	c := &v.Workers[best]
	return c.Worker, fmt.Sprintf("%d tokens to move in %.3g s, %d streams there", r.PromptTokens, bestTransfer, c.Load.Decodes), false
}

// inherits tells whether a worker could go on with a stream of from's.
func (r *Request) inherits(from *Worker, c *Candidate, v *View) bool {
	switch {
	case c.ID == from.ID, !c.Serves(r.Model), !c.takes() || !c.byDaemons(), c.weight() == 0, c.CoolUntil.After(v.Now), slices.Contains(r.Exclude, c.ID):
		return false
	case misfit(from, c.Worker) != "", v.PairBarred != nil && v.PairBarred(from.ID, c.ID), c.strain() != "":
		return false
	}
	return c.room(r.PromptTokens) == 0
}
