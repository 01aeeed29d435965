package rdma

import (
	"errors"
	"fmt"
	"testing"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// nullLane is a lane on the provider that does nothing but complete what is posted to it, of so many requests.
func nullLane(t *testing.T, queue int) (*lane, *cgo.CQ) {
	t.Helper()
	qp, cq, err := cgo.NullQP(queue)
	if errors.Is(err, cgo.ErrNotSupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cgo.CloseNull(qp) })
	return &lane{
		qp: qp, slots: make([]byte, 2*slotCount*slotSize), slotMR: &cgo.MR{}, credits: make(chan struct{}, slotCount), room: make(chan struct{}, 1), down: make(chan struct{}),
	}, cq
}

// A piece of any number of runs is its writes in order, the announcement behind them in the same chain where it fits, and one
// completion a chain.
func TestPostPiece(t *testing.T) {
	for _, runs := range []int{1, 2, 62, 63, 64, 65, 127, 128, 200} {
		t.Run(fmt.Sprintf("runs %d", runs), func(t *testing.T) {
			x, cq := nullLane(t, sendQueue)
			w := &transfer.Write{Runs: make([]transfer.Run, runs)}
			for i := range w.Runs {
				w.Runs[i] = transfer.Run{Src: uint64(i) * 4096, Dst: uint64(i) * 8192, Len: 4096}
			}
			c := cursor{runs: w.Runs, src: 1 << 40, srcSize: 1 << 30, dst: 1 << 41}
			begun, err := x.postPiece(w, &c, 0)
			if !begun || err != nil {
				t.Fatal(begun, err)
			}
			if x.posted != uint64(runs)+1 || x.signalled != x.posted || x.announced != 1 || len(x.pieces) != 1 || x.pieces[0].end != x.posted {
				t.Errorf("posted %d, signalled %d, announced %d, pending %+v", x.posted, x.signalled, x.announced, x.pieces)
			}
			wcs := make([]cgo.WC, sendQueue)
			n, err := cq.Poll(wcs)
			if want := runs/chainMax + 1; err != nil || n != want {
				t.Fatalf("%d completions, want %d: %v", n, want, err)
			}
			for i, wc := range wcs[:n] {
				id, bytes := uint64(i+1)*chainMax, uint32(4096)
				if i == n-1 {
					id, bytes = x.posted, announceSize
				}
				if wc.ID != id || wc.Bytes != bytes || (wc.HasImm == 1) != (i == n-1) {
					t.Errorf("completion %d is %+v, want request %d of %d bytes", i, wc, id, bytes)
				}
			}
		})
	}
}
