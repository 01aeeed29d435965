package kernel

import (
	"sync/atomic"
	"testing"
)

func TestPoolRunsEveryTaskOnce(t *testing.T) {
	for _, threads := range []int{1, 2, 4} {
		p := NewPool(threads)
		for run := range 2000 {
			n := run % 7
			var hits [7]atomic.Int32
			p.Run(n, func(thread, task int) {
				if thread < 0 || thread >= p.Threads() {
					t.Errorf("thread %d of %d", thread, p.Threads())
				}
				hits[task].Add(1)
			})
			for i := range n {
				if hits[i].Load() != 1 {
					t.Fatalf("run %d: task %d ran %d times", run, i, hits[i].Load())
				}
			}
		}
		p.Close()
		p.Close()
	}
}

// A parked helper must wake up: with two tasks that wait for each other, one thread alone would never finish.
func TestPoolWakesParkedHelpers(t *testing.T) {
	p := NewPool(2)
	defer p.Close()
	if p.Threads() < 2 {
		t.Skip("one processor")
	}
	for range 50 {
		for p.parked.Load() == 0 { // bounded by the helper's spin
			pause(100)
		}
		met := make(chan struct{})
		p.Run(2, func(_, task int) {
			if task == 0 {
				<-met
			} else {
				close(met)
			}
		})
	}
}

func BenchmarkPoolRun(b *testing.B) {
	p := NewPool(0)
	defer p.Close()
	for b.Loop() {
		p.Run(2, func(int, int) {})
	}
}
