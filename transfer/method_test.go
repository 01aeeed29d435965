package transfer

import (
	"testing"
	"time"
)

// run lets a chooser pick n pieces of 1 MiB whose modes cost what is said, and counts the picks.
func (c *Chooser) run(n, runs int, cost [modes]time.Duration) (picks [modes]int) {
	for range n {
		ch := c.Pick(1<<20, runs)
		picks[ch.Mode]++
		c.Took(ch, cost[ch.Mode], 1<<20)
	}
	return picks
}

func TestChooserTakesTheCheaperMode(t *testing.T) {
	for name, x := range map[string]struct {
		runs   int
		cost   [modes]time.Duration
		better Mode
	}{
		"tiny runs":               {16384, [modes]time.Duration{Direct: 900, Staged: 300}, Staged},
		"tiny runs, dear copies":  {16384, [modes]time.Duration{Direct: 300, Staged: 900}, Direct},
		"large runs":              {4, [modes]time.Duration{Direct: 300, Staged: 400}, Direct},
		"large runs, dear direct": {4, [modes]time.Duration{Direct: 400, Staged: 300}, Staged},
	} {
		var told []MethodStatus
		c := newChooser("send", func(m MethodStatus) { told = append(told, m) })
		picks := c.run(10000, x.runs, [modes]time.Duration{x.cost[Direct] * time.Microsecond, x.cost[Staged] * time.Microsecond})
		if other := picks[1-x.better]; other < modeTrials || other > 10000/tryClose+modeTrials+1 {
			t.Errorf("%s: the dearer mode was picked %d times of 10000", name, other)
		}
		st := c.Status()
		if len(st) != 1 || st[0].Mode != x.better.String() || st[0].Why == "" || len(told) == 0 || told[len(told)-1].Mode != x.better.String() {
			t.Errorf("%s: status %+v, told %+v", name, st, told)
		}
	}
}

func TestChooserFollowsChange(t *testing.T) {
	c := newChooser("receive", nil)
	c.run(1000, 64, [modes]time.Duration{Direct: 300, Staged: 400})
	picks := c.run(20000, 64, [modes]time.Duration{Direct: 700, Staged: 400})
	if picks[Staged] < 15000 {
		t.Errorf("staged picked %d times of 20000 since it became cheaper", picks[Staged])
	}
	// One measure in which the thread lost its processor does not turn it round.
	c.Took(Choice{Staged, int8(runClass(1<<20, 64)) + 1}, time.Second, 1<<20)
	c.run(100, 64, [modes]time.Duration{Direct: 700, Staged: 400})
	if st := c.Status(); st[0].Mode != "staged" {
		t.Errorf("status %+v", st)
	}
}

func TestChooserHasNothingToChoose(t *testing.T) {
	c := newChooser("send", nil)
	if ch := c.Pick(1<<20, 1); ch.Mode != Direct || ch.Measured() {
		t.Errorf("one run: %+v", ch)
	}
	if ch := (*Chooser)(nil).Pick(1<<20, 100); ch.Mode != Direct || ch.Measured() {
		t.Errorf("no chooser: %+v", ch)
	}
	for runs, class := range map[int]int{1 << 20: 0, 1 << 14: 0, 1 << 13: 1, 1 << 10: 4, 1: 14} {
		if got := runClass(1<<20, runs); got != class {
			t.Errorf("%d runs a MiB are of class %d, want %d", runs, got, class)
		}
	}
}
