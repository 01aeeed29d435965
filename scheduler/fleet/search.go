package fleet

import "math/bits"

// search is the state of one question.
type search struct {
	x    *Index
	a    *Ask
	wide int // which of wides an entry must have room for; -1: none
	best Pick
	ok   bool
}

// Best finds the place with the highest score for a claim among the hosts of a class: the lowest host among equals, and its
// lowest devices. False where nothing fits.
func (x *Index) Best(class int, a *Ask) (Pick, bool) {
	if class < 0 || class >= len(x.roots) || a.GPUs < 1 {
		return Pick{}, false
	}
	s := search{x: x, a: a, wide: -1}
	for i, n := range wides {
		if a.GPUs >= n {
			s.wide = i
		}
	}
	s.visit(x.roots[class], a.VRAM)
	return s.best, s.ok
}

// Better says whether a pick wins against another: the higher score, then the lower host, then the lower device.
func (p Pick) Better(q Pick) bool {
	if p.Score != q.Score {
		return p.Score > q.Score
	}
	if p.Host != q.Host {
		return p.Host < q.Host
	}
	return bits.TrailingZeros64(p.GPUs) < bits.TrailingZeros64(q.GPUs)
}

// visit goes through a subtree whose entries have at least least free, the tightest first.
func (s *search) visit(id int32, least int64) {
	for id != none {
		e := &s.x.entries[id]
		if e.ramMax < s.a.RAM || s.wide >= 0 && e.wideMax[s.wide] < s.a.VRAM {
			return
		}
		if s.ok {
			bound := s.x.w.Score(s.a.RAM, max(e.ramMin, s.a.RAM), s.a.VRAM, max(least, s.a.VRAM))
			if bound < s.best.Score || bound == s.best.Score && int(e.hostMin) > s.best.Host {
				return
			}
		}
		if e.vram >= s.a.VRAM {
			s.visit(e.left, least)
			s.try(e)
			least = max(least, e.vram)
		}
		id = e.right
	}
}

// try looks at an entry itself.
func (s *search) try(e *entry) {
	h := &s.x.hosts[e.host]
	if h.ram < s.a.RAM || h.cpu < s.a.CPU {
		return
	}
	p := Pick{Host: int(e.host)}
	if s.a.GPUs == 1 {
		p.GPUs = 1 << e.low
		p.Score = s.x.w.Score(s.a.RAM, h.ram, s.a.VRAM, e.vram)
	} else {
		if s.ok && p.Host == s.best.Host {
			return
		}
		var tightest int64
		p.GPUs, tightest = s.x.together(p.Host, s.a)
		if p.GPUs == 0 {
			return
		}
		p.Score = s.x.w.Score(s.a.RAM, h.ram, s.a.VRAM, tightest)
	}
	if !s.ok || p.Better(s.best) {
		s.best, s.ok = p, true
	}
}

// together picks devices of a host for a claim of several: the tightest that are enough, of one NUMA node where one has that
// many, and tells how much the tightest has free. No bits where there are too few.
func (x *Index) together(h int, a *Ask) (uint64, int64) {
	free := x.gpus(h)
	numa := x.numa[x.hosts[h].first:]
	var by [GPUsMax]uint8
	n := 0
	for i, v := range free {
		if v < a.VRAM {
			continue
		}
		k := n
		for ; k > 0 && free[by[k-1]] > v; k-- {
			by[k] = by[k-1]
		}
		by[k] = uint8(i)
		n++
	}
	if n < a.GPUs {
		return 0, 0
	}
	for first := range n {
		mask, count := uint64(0), 0
		for _, i := range by[:n] {
			if numa[i] == numa[by[first]] && count < a.GPUs {
				mask |= 1 << i
				count++
			}
		}
		if count == a.GPUs {
			return mask, x.tightest(free, mask)
		}
	}
	mask := uint64(0)
	for _, i := range by[:a.GPUs] {
		mask |= 1 << i
	}
	return mask, x.tightest(free, mask)
}

func (x *Index) tightest(free []int64, mask uint64) int64 {
	least := free[bits.TrailingZeros64(mask)]
	for rest := mask; rest != 0; rest &= rest - 1 {
		least = min(least, free[bits.TrailingZeros64(rest)])
	}
	return least
}

// On is the best place for a claim on one host.
func (x *Index) On(h int, a *Ask) (Pick, bool) {
	hs := &x.hosts[h]
	if hs.ram < a.RAM || hs.cpu < a.CPU || a.GPUs < 1 {
		return Pick{}, false
	}
	if a.GPUs > 1 {
		mask, tightest := x.together(h, a)
		return Pick{Host: h, GPUs: mask, Score: x.w.Score(a.RAM, hs.ram, a.VRAM, tightest)}, mask != 0
	}
	best, ok := Pick{}, false
	for i, v := range x.gpus(h) {
		if v < a.VRAM {
			continue
		}
		if p := (Pick{Host: h, GPUs: 1 << i, Score: x.w.Score(a.RAM, hs.ram, a.VRAM, v)}); !ok || p.Better(best) {
			best, ok = p, true
		}
	}
	return best, ok
}

// Scan answers as Best does by a look at every host: what the index is held against, in tests and in the benchmark.
func (x *Index) Scan(class int, a *Ask) (Pick, bool) {
	best, ok := Pick{}, false
	for h := range x.hosts {
		if int(x.hosts[h].class) != class {
			continue
		}
		if p, fits := x.On(h, a); fits && (!ok || p.Better(best)) {
			best, ok = p, true
		}
	}
	return best, ok
}
