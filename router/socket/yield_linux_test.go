package socket

import (
	"runtime"
	"sync"
	"testing"
)

func TestWhoIsAloneDoesNotYieldEachTime(t *testing.T) {
	before := yields.came.Load()
	for range 1000 {
		Yield()
	}
	if n := yields.came.Load() - before; n > 200 {
		t.Errorf("%d times of 1000", n)
	}
}

func TestWhoHasCompanyYields(t *testing.T) {
	const each = 1000
	prev := runtime.GOMAXPROCS(1)
	defer runtime.GOMAXPROCS(prev)
	before := yields.came.Load()
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			for range each {
				Yield()
			}
		})
	}
	both.Wait()
	if n := yields.came.Load() - before; n < each {
		t.Errorf("%d times of %d", n, 2*each)
	}
}
