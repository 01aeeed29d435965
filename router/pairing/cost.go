package pairing

import (
	"fmt"
	"math"
	"strings"
)

// Cost is what a choice is estimated to take, in seconds, its parts in the order in which they are paid.
type Cost struct {
	Queue    float64 `json:"queue_s"`    // for what the prefill worker has to compute before
	Prefill  float64 `json:"prefill_s"`  // of what is in no cache there
	Behind   float64 `json:"behind_s"`   // what the prefill delays requests that come after it
	Transfer float64 `json:"transfer_s"` // of the KV cache that the decode worker lacks, as far as it is not hidden behind prefill
	Decode   float64 `json:"decode_s"`   // by how much tokens come late for the load there
	Stall    float64 `json:"stall_s"`    // what the prefill costs streams that decode on the same worker
	Room     float64 `json:"room_s"`     // waiting for blocks, and for a worker that is strained
}

// Total is what choices are compared by.
func (c *Cost) Total() float64 {
	return c.Queue + c.Prefill + c.Behind + c.Transfer + c.Decode + c.Stall + c.Room
}

// Option is a choice that was weighed, for people to read.
type Option struct {
	Prefill string `json:"prefill,omitempty"`
	Decode  string `json:"decode,omitempty"`
	Whole   string `json:"whole,omitempty"`
	// Cached tokens of the prompt, where it is prefilled and where it is decoded.
	CachedPrefill int64 `json:"cached_prefill"`
	CachedDecode  int64 `json:"cached_decode"`
	Cost
	Sum    float64 `json:"total_s"`
	Chosen bool    `json:"chosen,omitempty"`
}

// What is counted with where nothing was measured, and how heavily what is no time of this request's own weighs.
const (
	outputTokens = 256 // that an answer has
	// decodeShare of the time by which all tokens of an answer come late counts beside that before its first token.
	decodeShare = 0.1
	// stallShare of a prefill is what each stream on the same worker loses by it, where it is worked off in chunks.
	stallShare = 0.02
	// behindShare of a prefill is what it costs others, who wait behind it or whose cached prompts it evicts. In bench/pairsim,
	// with 1 in place of 0 the mean time to the first token stays the same and the hit rate comes nearer to one large cache's.
	behindShare = 1
	// foreignTokens is the prompt that a request of another router is taken to have.
	foreignTokens = 1024

	priorNearBps    = 4e9 // of a channel within one node
	priorFarBps     = 1e9
	priorTokenBytes = 64 << 10
	// twoLegs is what two requests to engines take more than one.
	twoLegs = 0.002
	// tailShare of a transfer is left when the prefill it hides behind is over: its last layers.
	tailShare = 0.05
	// unequalSeconds and unequalShare are for copy plans of many small runs.
	unequalSeconds = 0.001
	unequalShare   = 0.25

	roomSeconds   = 2  // that a request waits at most for blocks, when it lacks all of them
	strainSeconds = 20 // makes a strained worker the last one, unless the others are hopeless
)

// queue is for how long the worker computes before it begins with one more prompt.
func (c *Candidate) queue(others *Speeds) float64 {
	s := c.speeds(others)
	seconds := float64(c.Load.PrefillTokens) / s.PrefillRate
	if c.Load.Prefills > 0 { // some of the first one is done
		head := seconds / float64(c.Load.Prefills)
		seconds -= min(max(c.Load.HeadFor.Seconds(), 0), head)
	}
	if c.Engine.Known {
		seconds += float64(min(c.Engine.Foreign, c.Engine.Waiting)*foreignTokens) / s.PrefillRate
	}
	return max(seconds, 0)
}

// cached is how much of the request's prompt the worker has.
func (r *Request) cached(c *Candidate) int64 {
	n := max(c.CachedTokens, r.saves(c))
	return max(min(n, r.PromptTokens-1), 0) // at least one token is computed
}

// side is what one worker costs as either end of a choice. It does not depend on the other.
type side struct {
	c      *Candidate
	cached int64
	// As the end that prefills, and as the one that decodes.
	prefill, decode           Cost
	prefillTotal, decodeTotal float64
}

func newSide(r *Request, c *Candidate, others *Speeds) side {
	s := c.speeds(others)
	x := side{c: c, cached: r.cached(c)}
	streams := float64(c.Load.Decodes + c.foreign())
	x.prefill.Queue = c.queue(others)
	x.prefill.Prefill = float64(r.PromptTokens-x.cached) / s.PrefillRate
	x.prefill.Behind = behindShare * x.prefill.Prefill
	x.prefill.Stall = x.prefill.Prefill * streams * stallShare
	x.decode.Decode = decodeShare * outputTokens * (s.ITL + s.ITLStream*streams)
	x.decode.Room = c.room(r.PromptTokens + outputTokens)
	if c.strain() != "" {
		x.prefill.Room += strainSeconds
		x.decode.Room += strainSeconds
	}
	x.prefillTotal, x.decodeTotal = x.prefill.Total(), x.decode.Total()
	return x
}

// room is how long a request for so many tokens of KV cache waits for them.
func (c *Candidate) room(tokens int64) float64 {
	all := float64(c.Blocks) * float64(c.BlockTokens)
	if all <= 0 || tokens <= 0 {
		return 0
	}
	used := float64(c.Load.HeldTokens)
	if c.Engine.Known && c.Engine.KVUsage > 0 {
		used = max(used, c.Engine.KVUsage*all)
	}
	lack := (float64(tokens) - max(all-used, 0)) / float64(tokens)
	return roomSeconds * min(max(lack, 0), 1)
}

// whole is the cost of everything on one worker.
func (x *side) whole() Cost {
	c := x.prefill
	c.Decode = x.decode.Decode
	c.Room = max(x.prefill.Room, x.decode.Room)
	return c
}

// pair is the cost of prefill on x and decode on d.
func (x *side) pair(r *Request, v *View, d *side) Cost {
	c := x.prefill
	c.Decode = d.decode.Decode
	c.Room += d.decode.Room
	// While the decode worker computes prompts of its own, its streams wait.
	c.Stall += stallShare * d.prefill.Queue
	way, known := v.channel(x.c, d.c)
	c.Transfer = way.seconds(x.c, d.c, known, r.PromptTokens-d.cached, x.prefill.Prefill) + twoLegs
	return c
}

// seconds is what the transfer of so many tokens' KV cache adds to a prefill that takes so long.
func (c *Channel) seconds(p, d *Candidate, known bool, tokens int64, prefill float64) float64 {
	speed, perToken := c.SpeedBps, c.TokenBytes
	if speed <= 0 {
		if speed = priorFarBps; p.NodeID != "" && p.NodeID == d.NodeID {
			speed = priorNearBps
		}
	}
	if perToken <= 0 {
		perToken = priorTokenBytes
	}
	rtt := 0.0
	if known {
		speed *= max(1-againWeight*max(c.AgainShare, 0), speedLeft)
		rtt = c.RTT.Seconds()
	}
	move := float64(tokens) * perToken / speed
	seconds := rtt + c.BacklogBytes/speed
	if unequal(p, d) {
		move *= 1 + unequalShare
		seconds += unequalSeconds
	}
	if p.overlaps() { // layers go while the next ones are computed
		move = max(move-prefill, tailShare*move)
	}
	return min(seconds+move, math.MaxInt32)
}

// overlaps tells whether the worker's KV cache goes out while it is computed.
func (w *Worker) overlaps() bool { return w.byDaemons() || traits[w.Dialect].layered }

func (c *Cost) words() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%.3g s", c.Total())
	sep := " = "
	for _, p := range [...]struct {
		name    string
		seconds float64
	}{{"queue", c.Queue}, {"prefill", c.Prefill}, {"others behind", c.Behind}, {"transfer", c.Transfer}, {"decode", c.Decode}, {"stall", c.Stall}, {"room", c.Room}} {
		if p.seconds >= 0.0005 {
			fmt.Fprintf(&b, "%s%s %.3g", sep, p.name, p.seconds)
			sep = " + "
		}
	}
	return b.String()
}
