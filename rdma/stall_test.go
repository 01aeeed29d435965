package rdma

import (
	"testing"
	"time"

	"github.com/headrace/headrace/cgo"
)

// A device that takes requests and never completes them stands still; one with nothing to do does not.
func TestLaneStandsStill(t *testing.T) {
	qp, cq, err := cgo.NullQP(0)
	if err != nil {
		t.Skip(err)
	}
	_ = cq // freed with its queue pair
	defer cgo.CloseNull(qp)
	x := &lane{qp: qp, rail: &rail{name: "null"}}
	if err := x.stalled(time.Now().Add(time.Hour)); err != nil {
		t.Errorf("with nothing under way: %v", err)
	}
	if _, err := x.push([]cgo.WR{{Op: cgo.Write}}); err != nil {
		t.Fatal(err)
	}
	began := x.moved
	if _, err := x.push([]cgo.WR{{Op: cgo.Write}}); err != nil {
		t.Fatal(err)
	}
	if err := x.stalled(began.Add(stallEnd - 1)); err != nil {
		t.Errorf("too early: %v", err)
	}
	if x.stalled(began.Add(stallEnd)) == nil {
		t.Errorf("a lane that completes nothing for %v passes for one that works", stallEnd)
	}
	x.completed, x.moved = 1, began.Add(stallEnd)
	if err := x.stalled(began.Add(stallEnd)); err != nil {
		t.Errorf("after a completion: %v", err)
	}
}
