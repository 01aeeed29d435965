package telemetry

import (
	"math"
	"reflect"
)

// Times are durations from posting to completion.
type Times struct {
	Slots [40]uint64 // slot i: below 2^i nanoseconds, and not below half of it; the last one: the rest
	SumNS uint64
	Count uint64
}

// Buckets are the counts of all that took at most so many seconds, as Prometheus wants them.
func (t *Times) Buckets() map[float64]uint64 {
	const first, last = 10, 35 // 1 us to 34 s
	out := make(map[float64]uint64, last-first+1)
	sum := uint64(0)
	for i, n := range t.Slots {
		sum += n
		if i >= first && i <= last {
			out[math.Ldexp(1e-9, i)] = sum
		}
	}
	return out
}

// probed is what a probe of this host attaches to.
//
//go:noinline
func probed() {}

func probedAddr() uintptr { return reflect.ValueOf(probed).Pointer() }
