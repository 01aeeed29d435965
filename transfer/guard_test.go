package transfer

import (
	"sync"
	"sync/atomic"
	"testing"
)

func TestGuardWaitsForEveryHolder(t *testing.T) {
	for range 200 {
		g := newGuard()
		var inside, late atomic.Int64
		var fenced atomic.Bool
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for g.enter() {
					inside.Add(1)
					if fenced.Load() {
						late.Add(1)
					}
					inside.Add(-1)
					g.leave()
				}
			})
		}
		for inside.Load() == 0 && late.Load() == 0 {
			if g.enter() {
				g.leave()
			}
			break
		}
		g.shut()
		<-g.drained
		fenced.Store(true)
		if n := inside.Load(); n != 0 {
			t.Fatalf("%d holders inside after the fence", n)
		}
		wg.Wait()
		if late.Load() != 0 {
			t.Fatal("a holder entered after the fence")
		}
	}
}

func TestGuardShutWhileHeld(t *testing.T) {
	g := newGuard()
	if !g.enter() {
		t.Fatal("open guard refused")
	}
	g.shut()
	if g.enter() {
		t.Fatal("shut guard let somebody in")
	}
	select {
	case <-g.drained:
		t.Fatal("drained while held")
	default:
	}
	g.leave()
	<-g.drained
}
