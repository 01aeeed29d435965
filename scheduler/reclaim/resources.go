// Package reclaim admits tasks of jobs to hosts under the quotas of their queues, and lets inference take room from
// training: which tasks fall is searched for, so that they are the fewest, and decided whole before any falls. It is
// pure; what falls and what comes is an answer, done by somebody else.
//
// The rules are Volcano's capacity-card plugin's, with its known faults left out (docs/scheduling.md says which).
package reclaim

import (
	"slices"
	"strings"

	"github.com/headrace/headrace/scheduler/cluster"
)

// vector is an amount of each dimension: 0 is milli cores, 1 bytes of memory, the rest milli cards by dims.
type vector []int64

// dims names the dimensions of a snapshot: cpu, memory, and each card in order of its name.
type dims struct {
	names []string
	at    map[string]int
}

const (
	cpuDim = 0
	memDim = 1
)

func newDims(s *cluster.Snapshot) *dims {
	cards := map[string]bool{}
	for i := range s.Hosts {
		for _, g := range s.Hosts[i].GPUs {
			if g.Card != "" {
				cards[g.Card] = true
			}
		}
		for c := range s.Hosts[i].Cards {
			cards[c] = true
		}
	}
	for _, j := range s.Jobs {
		for _, t := range j.Tasks {
			for c := range t.Request.Cards {
				cards[c] = true
			}
		}
	}
	for _, q := range s.Queues {
		for c := range q.Quota.Cards {
			cards[c] = true
		}
	}
	names := make([]string, 0, len(cards))
	for c := range cards {
		names = append(names, c)
	}
	slices.Sort(names)
	d := &dims{names: append([]string{"cpu", "memory"}, names...), at: map[string]int{}}
	for i, n := range d.names {
		if i > memDim {
			d.at[n] = i
		}
	}
	return d
}

func (d *dims) request(r *cluster.Resources) vector {
	v := make(vector, len(d.names))
	v[cpuDim], v[memDim] = int64(r.CPU), int64(r.Memory)
	for c, n := range r.Cards {
		v[d.at[c]] += int64(n)
	}
	return v
}

// text writes an amount of a dimension for people.
func (d *dims) text(dim int, n int64) string {
	if dim == memDim {
		return formatBytes(n)
	}
	return cluster.Milli(n).String()
}

func formatBytes(n int64) string {
	for _, u := range []struct {
		name  string
		bytes int64
	}{{"GiB", 1 << 30}, {"MiB", 1 << 20}} {
		if n != 0 && n%u.bytes == 0 {
			return cluster.Milli(n/u.bytes*1000).String() + u.name
		}
	}
	return cluster.Milli(n*1000).String() + "B"
}

func (v vector) add(w vector) {
	for i := range v {
		v[i] += w[i]
	}
}

func (v vector) sub(w vector) {
	for i := range v {
		v[i] -= w[i]
	}
}

// covers says whether v has what w asks for: a dimension that is not asked for is not looked at.
func (v vector) covers(w vector) bool {
	for i := range w {
		if w[i] > 0 && v[i] < w[i] {
			return false
		}
	}
	return true
}

// short lists the dimensions in which v has less than w asks for.
func (d *dims) short(v, w vector) string {
	var out []string
	for i := range w {
		if w[i] > 0 && v[i] < w[i] {
			out = append(out, d.names[i]+": "+d.text(i, w[i])+" needed, "+d.text(i, v[i])+" free")
		}
	}
	return strings.Join(out, ", ")
}

// cardsIn says whether any card is asked for.
func (v vector) cardsIn() bool {
	return slices.ContainsFunc(v[memDim+1:], func(n int64) bool { return n > 0 })
}
