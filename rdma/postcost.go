package rdma

import (
	"time"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// PostCost is what posting scattered blocks takes, in nanoseconds for all of them.
type PostCost struct {
	Ours  float64 // the way of a lane: runs of a copy plan made into chains, numbered, signalled and posted
	Loop  float64 // a plain C loop, one request at a time
	Chain float64 // the same in chains of 64
}

// MeasurePost measures one round of posts of so many blocks to a provider that does nothing, many times over, the three in
// turns. It needs no device.
func MeasurePost(blocks, times int) (c PostCost, err error) {
	qp, cq, err := cgo.NullQP(0)
	if err != nil {
		return c, err
	}
	_ = cq // freed with its queue pair
	defer cgo.CloseNull(qp)
	const block = 64 << 10
	runs := make([]transfer.Run, blocks)
	wrs := make([]cgo.WR, blocks)
	for i := range runs {
		runs[i] = transfer.Run{Src: uint64(i) * 2 * block, Dst: uint64(i*7919%blocks) * 2 * block, Len: block}
		wrs[i] = cgo.WR{Local: 1<<40 + runs[i].Src, Remote: 1<<41 + runs[i].Dst, ID: uint64(i), Len: block, LKey: 1, RKey: 2}
	}
	x := &lane{qp: qp}
	var ours time.Duration
	for range times {
		cur := cursor{runs: runs, src: 1 << 40, srcSize: 1 << 40, lkey: 1, dst: 1 << 41, rkey: 2}
		start := time.Now()
		for !cur.end() {
			if _, err := x.push(cur.next(x.chain[:])); err != nil {
				return c, err
			}
		}
		ours += time.Since(start)
		c.Loop += float64(cgo.NullLoop(qp, wrs, 1, false))
		c.Chain += float64(cgo.NullLoop(qp, wrs, 1, true))
	}
	n := float64(times)
	return PostCost{Ours: float64(ours.Nanoseconds()) / n, Loop: c.Loop / n, Chain: c.Chain / n}, nil
}
