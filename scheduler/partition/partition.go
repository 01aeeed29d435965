// Package partition divides hosts over control functions by rendezvous hashing: a host belongs to the function whose
// hash with it is the highest. When a function comes or goes only the hosts move that choose it or had chosen it. It knows names,
// and nothing of what a function does.
package partition

import (
	"math"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/headrace/headrace/scheduler/cluster"
)

// Owner is the function that a host belongs to; "" where there is none.
func Owner(host string, functions []string) string {
	best, most := "", uint64(0)
	for _, f := range functions {
		if w := weight(host, f); best == "" || w > most || w == most && f < best {
			best, most = f, w
		}
	}
	return best
}

// Choices are the functions in the order in which a host chooses them: on scarcity, who probes goes down this list.
func Choices(host string, functions []string) []string {
	out := slices.Clone(functions)
	slices.SortFunc(out, func(a, b string) int {
		switch x, y := weight(host, a), weight(host, b); {
		case x > y || x == y && a < b:
			return -1
		case a == b:
			return 0
		}
		return 1
	})
	return out
}

func weight(host, function string) uint64 {
	var d xxhash.Digest
	d.Reset()
	_, _ = d.WriteString(function)
	_, _ = d.Write([]byte{0})
	_, _ = d.WriteString(host)
	return d.Sum64()
}

// Plan divides hosts, in the order of the functions, and says what moved since previous; nil where there is none.
func Plan(hosts, functions, previous []string) ([]cluster.PartitionPlan, *cluster.PartitionChange) {
	plans := make([]cluster.PartitionPlan, len(functions))
	for i, f := range functions {
		plans[i] = cluster.PartitionPlan{Function: f, Hosts: []string{}}
	}
	change := &cluster.PartitionChange{Hosts: []string{}}
	for _, h := range hosts {
		owner := Owner(h, functions)
		if i := slices.Index(functions, owner); i >= 0 {
			plans[i].Hosts = append(plans[i].Hosts, h)
		}
		if len(previous) > 0 && Owner(h, previous) != owner {
			change.Hosts = append(change.Hosts, h)
		}
	}
	if len(previous) == 0 {
		return plans, nil
	}
	if len(hosts) > 0 {
		change.Share = float64(len(change.Hosts)) / float64(len(hosts))
	}
	return plans, change
}

// Count is how many of a function serve rate requests a second, each at most most; at least one. most 0 is not known: one.
func Count(rate, most float64) int {
	if most <= 0 || rate <= 0 {
		return 1
	}
	return max(int(min(math.Ceil(rate/most), math.MaxInt32)), 1)
}
