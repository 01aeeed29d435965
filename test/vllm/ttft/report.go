package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"gonum.org/v1/gonum/stat"
)

// stalled is from when on an answer counts as a stall: far above what a quarter of its kind and length stay below. A
// median would not do, because NIXL stalls more often than not at some lengths.
func stalled(sorted []time.Duration, above time.Duration) time.Duration {
	quartile := sorted[len(sorted)/4]
	return quartile + max(above, quartile/4)
}

// result is a kind's times at one length.
type result struct {
	all    []time.Duration // sorted
	stalls int             // so many of the last
}

func (k *kind) result(n int, above time.Duration) result {
	r := result{all: slices.Sorted(slices.Values(k.times[n]))}
	if len(r.all) == 0 {
		return r
	}
	limit := stalled(r.all, above)
	for _, t := range r.all {
		if t > limit {
			r.stalls++
		}
	}
	return r
}

func (r result) without() []time.Duration { return r.all[:len(r.all)-r.stalls] }

// counted is what a kind is judged by: NIXL without its stalls, everybody else with them.
func (k *kind) counted(r result) []time.Duration {
	if k.name == "nixl" {
		return r.without()
	}
	return r.all
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// cell is the median, the largest, and the stalls.
func (k *kind) cell(n int, above time.Duration) string {
	r := k.result(n, above)
	counted := k.counted(r)
	if len(counted) == 0 {
		return fmt.Sprintf("no answer in %d", k.fails[n])
	}
	text := fmt.Sprintf("%.1f (%.0f)", ms(counted[len(counted)/2]), ms(counted[len(counted)-1]))
	if r.stalls > 0 {
		text += fmt.Sprintf(", %d stalls to %.0f", r.stalls, ms(r.all[len(r.all)-1]))
	}
	if k.fails[n] > 0 {
		text += fmt.Sprintf(", %d failed", k.fails[n])
	}
	return text
}

// report prints the table, in Markdown.
func report(w io.Writer, o *options, kinds []*kind) {
	cores := "share the cores"
	if o.pin {
		cores = "have a core each"
	}
	fmt.Fprintf(w, "\nTime to the first token at the client in ms: median (largest) of %d. A pair's engines %s; NIXL's progress thread pauses %d us.\n", o.rounds, cores, o.delayUS)
	fmt.Fprintf(w, "A stall is an answer later than the lower quartile of its kind and length by more than %s and more than a quarter.\n", o.stall)
	fmt.Fprint(w, "Stalls are left out of nixl's figures, and of nobody else's.\n\n")
	head, line := "| tokens |", "|---|"
	for _, k := range kinds {
		head, line = head+" "+k.name+" |", line+"---|"
	}
	fmt.Fprintf(w, "%s\n%s\n", head, line)
	for _, n := range o.lengths {
		fmt.Fprintf(w, "| %d |", n)
		for _, k := range kinds {
			fmt.Fprintf(w, " %s |", k.cell(n, o.stall))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
	for _, k := range kinds {
		k.reportPhases(w, o)
	}
	compared(w, o, kinds)
}

// apart is where nine of ten differences of medians lie when answers are drawn again, with replacement, from those there are (Efron's
// bootstrap): milliseconds.
func apart(x, y []time.Duration) (low, high float64) {
	const draws = 4000
	r := rand.New(rand.NewPCG(1, 1))
	median := func(of, into []time.Duration) float64 {
		for i := range into {
			into[i] = of[r.IntN(len(of))]
		}
		slices.Sort(into)
		return ms(into[len(into)/2])
	}
	a, b := make([]time.Duration, len(x)), make([]time.Duration, len(y))
	differ := make([]float64, draws)
	for i := range differ {
		differ[i] = median(x, a) - median(y, b)
	}
	slices.Sort(differ)
	return stat.Quantile(0.05, stat.Empirical, differ, nil), stat.Quantile(0.95, stat.Empirical, differ, nil)
}

// compared says how far ours and NIXL's are apart, and at which lengths ours is the slower one.
func compared(w io.Writer, o *options, kinds []*kind) {
	find := func(name string) *kind {
		i := slices.IndexFunc(kinds, func(k *kind) bool { return k.name == name })
		if i < 0 {
			return nil
		}
		return kinds[i]
	}
	ours, theirs := find("headrace"), find("nixl")
	if ours == nil || theirs == nil {
		return
	}
	var slower []string
	stalls := 0
	for _, n := range o.lengths {
		a, b := ours.result(n, o.stall), theirs.result(n, o.stall)
		stalls += a.stalls + ours.fails[n]
		x, y := ours.counted(a), theirs.counted(b)
		if len(y) > 0 && (len(x) == 0 || x[len(x)/2] > y[len(y)/2]) {
			slower = append(slower, fmt.Sprint(n))
		}
		if len(x) > 0 && len(y) > 0 {
			low, high := apart(x, y)
			fmt.Fprintf(w, "%d tokens: headrace's median less nixl's is %+.1f ms, %+.1f to %+.1f in 9 of 10 draws\n", n, ms(x[len(x)/2]-y[len(y)/2]), low, high)
		}
	}
	fmt.Fprintf(w, "headrace has %d stalls and failures; its median is above nixl's at %d of %d lengths %s\n", stalls, len(slower), len(o.lengths), strings.Join(slower, ", "))
}
