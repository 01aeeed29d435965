package transfer

import "testing"

// Patience ends after so many ticks without news, whenever they come, and begins anew with each news.
func TestPatience(t *testing.T) {
	p := patience{limit: 3}
	for i, tt := range []struct {
		news uint64
		over bool
	}{{1, false}, {1, false}, {1, false}, {2, false}, {2, false}, {2, false}, {2, true}, {2, true}, {3, false}} {
		if got := p.over(tt.news); got != tt.over {
			t.Errorf("tick %d: %v", i, got)
		}
	}
	if e := (&Engine{cfg: Config{PingInterval: 500e6}}); e.ticks(2500e6) != 5 || e.ticks(2501e6) != 6 || e.ticks(1) != 1 {
		t.Error("ticks are not rounded up")
	}
}
