package partition

import (
	"fmt"
	"slices"
	"testing"
)

func names(prefix string, n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprint(prefix, i))
	}
	return list
}

// TestOnlyWhatMustMoves: of one function more among n about 1/n of the hosts move, all to it; of one less only its own.
func TestOnlyWhatMustMoves(t *testing.T) {
	hosts := names("node", 2100)
	for _, n := range []int{2, 5, 20, 35} {
		before := names("f", n)
		after := append(slices.Clone(before), "f-new")
		plans, moved := Plan(hosts, after, before)
		if share := float64(len(hosts)) / float64(n+1); float64(len(moved.Hosts)) > 1.5*share || float64(len(moved.Hosts)) < share/2 {
			t.Errorf("%d to %d functions: %d of %d hosts moved", n, n+1, len(moved.Hosts), len(hosts))
		}
		if got := plans[n].Hosts; !slices.Equal(got, moved.Hosts) {
			t.Errorf("%d hosts moved, the new function has %d", len(moved.Hosts), len(got))
		}
		total := 0
		for _, p := range plans {
			total += len(p.Hosts)
		}
		if total != len(hosts) {
			t.Errorf("%d of %d hosts have an owner", total, len(hosts))
		}
		back, less := Plan(hosts, before, after)
		if !slices.Equal(less.Hosts, moved.Hosts) || len(back) != n {
			t.Errorf("without it %d hosts moved, %d had been its own", len(less.Hosts), len(moved.Hosts))
		}
	}
}

func TestChoicesBeginWithTheOwner(t *testing.T) {
	functions := names("f", 7)
	for _, h := range names("node", 100) {
		c := Choices(h, functions)
		if c[0] != Owner(h, functions) || len(c) != 7 {
			t.Fatalf("%s: %v, owner %s", h, c, Owner(h, functions))
		}
		if second := Owner(h, c[1:]); second != c[1] {
			t.Fatalf("%s: without %s it is %s, the second choice is %s", h, c[0], second, c[1])
		}
	}
	if Owner("h", nil) != "" {
		t.Error("a host without functions has an owner")
	}
}

func TestCount(t *testing.T) {
	for _, c := range []struct {
		rate, most float64
		want       int
	}{{0, 100, 1}, {100, 100, 1}, {101, 100, 2}, {20000, 600, 34}, {5, 0, 1}} {
		if got := Count(c.rate, c.most); got != c.want {
			t.Errorf("%v a second of %v each: %d, want %d", c.rate, c.most, got, c.want)
		}
	}
}
