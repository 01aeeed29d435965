package planner

import (
	"fmt"
	"slices"
	"time"
)

// lengths learns how long answers are. Of requests that came lately those with long answers are still being answered: to count only what is
// complete would make answers seem short, most of all when many come after few.
type lengths struct {
	Done []length `json:"done,omitempty"`
	Next int      `json:"next"`
}

type length struct {
	Tokens int           `json:"n"`
	Came   time.Duration `json:"came_ns"`
	Ended  time.Duration `json:"ended_ns"`
}

const (
	lengthsMax   = 4096
	lengthsLeast = 200 // that the distribution is made of, where there are so many
)

func (l *lengths) add(tokens int, came, ended time.Duration) {
	if len(l.Done) < lengthsMax {
		l.Done = append(l.Done, length{tokens, came, ended})
	} else {
		l.Done[l.Next] = length{tokens, came, ended}
	}
	l.Next = (l.Next + 1) % lengthsMax
}

// sample appends n lengths, spread evenly over the distribution that Kaplan and Meier's estimator makes of the answers that are complete and
// of the tokens that those in progress have so far. Of the former, those count whose requests came since then, as lengths change, and since
// everything is remembered; or the latest where these are few.
func (l *lengths) sample(out []int, making []int, n int, since time.Duration) []int {
	var remembered time.Duration
	if len(l.Done) == lengthsMax {
		remembered = l.Done[l.Next].Ended
	}
	done := l.since(remembered)
	if len(done) < len(l.Done)/4 { // answers take longer than is remembered
		done, making = l.since(0), nil
	} else {
		done = l.since(max(remembered, min(since, l.latest(lengthsLeast))))
	}
	slices.Sort(done)
	open := slices.Clone(making)
	slices.Sort(open)
	// ends[i] is the part of answers that are at most done[i] long.
	ends := make([]float64, len(done))
	survive, k := 1.0, 0
	for i := 0; i < len(done); {
		same := i
		for same < len(done) && done[same] == done[i] {
			same++
		}
		for k < len(open) && open[k] < done[i] {
			k++
		}
		survive *= 1 - float64(same-i)/float64(len(done)-i+len(open)-k)
		for ; i < same; i++ {
			ends[i] = 1 - survive
		}
	}
	longest := done[len(done)-1]
	if len(open) > 0 {
		longest = max(longest, open[len(open)-1]*3/2)
	}
	const golden = 0.6180339887498949
	for i := range n {
		u := (float64(i) + 0.5) * golden
		u -= float64(int(u))
		at, _ := slices.BinarySearch(ends, u)
		if at < len(done) {
			out = append(out, done[at])
		} else {
			out = append(out, longest)
		}
	}
	return out
}

// since are the lengths of the answers to requests that came since then.
func (l *lengths) since(came time.Duration) (tokens []int) {
	for _, d := range l.Done {
		if d.Came >= came {
			tokens = append(tokens, d.Tokens)
		}
	}
	return tokens
}

// latest is since when n of the requests came whose answers are complete.
func (l *lengths) latest(n int) time.Duration {
	if len(l.Done) <= n {
		return 0
	}
	came := make([]time.Duration, len(l.Done))
	for i, d := range l.Done {
		came[i] = d.Came
	}
	slices.Sort(came)
	return came[len(came)-n]
}

// tokensMost is more than any prompt or answer has.
const tokensMost = 1 << 26

func (l *lengths) check() error {
	if len(l.Done) > lengthsMax || l.Next < 0 || l.Next >= lengthsMax {
		return fmt.Errorf("%d lengths are remembered, the next of them is %d", len(l.Done), l.Next)
	}
	for _, d := range l.Done {
		if d.Tokens < 0 || d.Tokens > tokensMost {
			return fmt.Errorf("an answer had %d tokens", d.Tokens)
		}
	}
	return nil
}
