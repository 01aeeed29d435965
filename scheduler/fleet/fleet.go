// Package fleet is an index over the free capacity of many hosts: it answers which host and GPUs a claim fills best, exactly
// as a look at every one of them would, in time that grows with the logarithm of their number. It knows numbers alone:
// no names, no models, no reasons.
//
// A host's GPUs with equally much free are one entry, kept in a treap by (free VRAM, free RAM, host); each subtree knows what
// it has at best, so a search goes down from the tightest entry and leaves out what cannot win. Nothing is allocated once
// the index is built. An Index is for one goroutine at a time.
package fleet

import (
	"fmt"
	"math"
	"math/bits"
)

// GPUsMax is how many devices a host may have.
const GPUsMax = 64

// Uncounted is the RAM or CPU of a host that does not count it.
const Uncounted = math.MaxInt64

// Host is what a host has free.
type Host struct {
	Class    int // hosts of a class are searched together; from 0
	RAM, CPU int64
	GPUs     []int64 // free VRAM of each device
	NUMA     []int   // node of each device; nil: all of one
}

// Weights are those of the binpack score.
type Weights struct{ RAM, VRAM, Max float64 }

// Score of a claim on what is allocatable before it: (ram/ramAlloc*RAM + vram/vramAlloc*VRAM)/(RAM+VRAM)*Max. What nobody counts
// adds nothing; without weights it is 0.
func (w Weights) Score(ram, ramAlloc, vram, vramAlloc int64) float64 {
	if w.RAM+w.VRAM <= 0 {
		return 0
	}
	return (ratio(ram, ramAlloc)*w.RAM + ratio(vram, vramAlloc)*w.VRAM) / (w.RAM + w.VRAM) * w.Max
}

func ratio(claim, alloc int64) float64 {
	if alloc <= 0 || alloc == Uncounted {
		return 0
	}
	return float64(claim) / float64(alloc)
}

// Ask is a claim: a number of GPUs of one host with VRAM each, and RAM and CPU of the host.
type Ask struct {
	GPUs     int
	VRAM     int64
	RAM, CPU int64
}

// Pick is an answer: the host, its devices as bits, and the score.
type Pick struct {
	Host  int
	GPUs  uint64
	Score float64
}

// wides are the numbers of GPUs for which an entry knows the free VRAM of its host's n-th best device.
var wides = [...]int{2, 4, 8}

// entry is the devices of a host with equally much free. Its id is the host's first slot plus its lowest device.
type entry struct {
	left, right int32
	host        int32
	hostMin     int32 // lowest host below
	prio        uint32
	low         int32 // lowest device
	vram, ram   int64
	ramMin      int64 // below
	ramMax      int64
	wide        [len(wides)]int64
	wideMax     [len(wides)]int64
}

type host struct {
	class    int32
	first    int32 // slot of its device 0
	devices  int32
	ram, cpu int64
	entries  uint64 // devices that stand for an entry
}

// none is no entry.
const none = -1

// Index is the structure. Make one with New.
type Index struct {
	w       Weights
	hosts   []host
	free    []int64 // by slot
	numa    []int32 // by slot
	entries []entry // by slot
	roots   []int32 // by class
}

// New builds an index. It keeps none of hosts.
func New(hosts []Host, w Weights) (*Index, error) {
	slots, classes := 0, 0
	for i := range hosts {
		if len(hosts[i].GPUs) > GPUsMax {
			return nil, fmt.Errorf("index host %d: %d GPUs are more than %d", i, len(hosts[i].GPUs), GPUsMax)
		}
		slots += len(hosts[i].GPUs)
		classes = max(classes, hosts[i].Class+1)
	}
	if slots > math.MaxInt32 {
		return nil, fmt.Errorf("index hosts: %d GPUs are too many", slots)
	}
	x := &Index{w: w, hosts: make([]host, len(hosts)), free: make([]int64, slots), numa: make([]int32, slots), entries: make([]entry, slots), roots: make([]int32, classes)}
	for i := range x.roots {
		x.roots[i] = none
	}
	first := int32(0)
	seed := uint32(2463534242) // any constant: heights are what is random here, and answers do not depend on them
	for i, h := range hosts {
		x.hosts[i] = host{class: int32(h.Class), first: first, devices: int32(len(h.GPUs)), ram: h.RAM, cpu: h.CPU}
		for j, free := range h.GPUs {
			seed ^= seed << 13
			seed ^= seed >> 17
			seed ^= seed << 5
			x.free[first] = free
			if h.NUMA != nil {
				x.numa[first] = int32(h.NUMA[j])
			}
			x.entries[first].prio = seed
			first++
		}
		x.insertHost(i)
	}
	return x, nil
}

// Hosts is how many there are; devices of host h are gpus(h).
func (x *Index) Hosts() int { return len(x.hosts) }

func (x *Index) gpus(h int) []int64 {
	first := x.hosts[h].first
	return x.free[first : first+x.hosts[h].devices]
}

// Free says what a host has left of a device, and of RAM and CPU.
func (x *Index) Free(h, gpu int) (vram, ram, cpu int64) {
	return x.gpus(h)[gpu], x.hosts[h].ram, x.hosts[h].cpu
}

// insertHost makes entries of a host's devices and puts them into the tree.
func (x *Index) insertHost(h int) {
	hs := &x.hosts[h]
	free := x.gpus(h)
	var wide [len(wides)]int64
	nthBest(free, &wide)
	hs.entries = 0
	for i, v := range free {
		same := false
		for rest := hs.entries; rest != 0 && !same; rest &= rest - 1 {
			same = free[bits.TrailingZeros64(rest)] == v
		}
		if same {
			continue
		}
		hs.entries |= 1 << i
		id := hs.first + int32(i)
		e := &x.entries[id]
		prio := e.prio
		*e = entry{left: none, right: none, host: int32(h), low: int32(i), prio: prio, vram: v, ram: hs.ram, wide: wide}
		x.pull(id)
		x.roots[hs.class] = x.insert(x.roots[hs.class], id)
	}
}

// removeHost takes a host's entries out of the tree.
func (x *Index) removeHost(h int) {
	hs := &x.hosts[h]
	for rest := hs.entries; rest != 0; rest &= rest - 1 {
		id := hs.first + int32(bits.TrailingZeros64(rest))
		x.roots[hs.class] = x.erase(x.roots[hs.class], id)
	}
	hs.entries = 0
}

// nthBest finds the n-th largest for each of wides; -1 where there are not that many.
func nthBest(free []int64, out *[len(wides)]int64) {
	var top [8]int64 // as large as the last of wides
	n := 0
	for _, v := range free {
		if n == len(top) && v <= top[n-1] {
			continue
		}
		i := min(n, len(top)-1)
		for ; i > 0 && top[i-1] < v; i-- {
			top[i] = top[i-1]
		}
		top[i] = v
		n = min(n+1, len(top))
	}
	for i, k := range wides {
		out[i] = -1
		if n >= k {
			out[i] = top[k-1]
		}
	}
}

// less is the order of entries.
func (x *Index) less(a, b int32) bool {
	p, q := &x.entries[a], &x.entries[b]
	if p.vram != q.vram {
		return p.vram < q.vram
	}
	if p.ram != q.ram {
		return p.ram < q.ram
	}
	return a < b // ids rise with hosts
}

// pull recomputes what an entry knows of those below it.
func (x *Index) pull(id int32) {
	e := &x.entries[id]
	e.ramMin, e.ramMax, e.hostMin, e.wideMax = e.ram, e.ram, e.host, e.wide
	for _, c := range [2]int32{e.left, e.right} {
		if c == none {
			continue
		}
		k := &x.entries[c]
		e.ramMin, e.ramMax, e.hostMin = min(e.ramMin, k.ramMin), max(e.ramMax, k.ramMax), min(e.hostMin, k.hostMin)
		for i := range e.wideMax {
			e.wideMax[i] = max(e.wideMax[i], k.wideMax[i])
		}
	}
}

func (x *Index) insert(root, id int32) int32 {
	if root == none {
		return id
	}
	r := &x.entries[root]
	if e := &x.entries[id]; e.prio > r.prio {
		e.left, e.right = x.split(root, id)
		x.pull(id)
		return id
	}
	if x.less(id, root) {
		r.left = x.insert(r.left, id)
	} else {
		r.right = x.insert(r.right, id)
	}
	x.pull(root)
	return root
}

// split divides a tree into what comes before id and what comes after it.
func (x *Index) split(root, id int32) (before, after int32) {
	if root == none {
		return none, none
	}
	r := &x.entries[root]
	if x.less(root, id) {
		r.right, after = x.split(r.right, id)
		before = root
	} else {
		before, r.left = x.split(r.left, id)
		after = root
	}
	x.pull(root)
	return before, after
}

func (x *Index) erase(root, id int32) int32 {
	r := &x.entries[root]
	if root == id {
		return x.merge(r.left, r.right)
	}
	if x.less(id, root) {
		r.left = x.erase(r.left, id)
	} else {
		r.right = x.erase(r.right, id)
	}
	x.pull(root)
	return root
}

func (x *Index) merge(a, b int32) int32 {
	switch {
	case a == none:
		return b
	case b == none:
		return a
	case x.entries[a].prio > x.entries[b].prio:
		x.entries[a].right = x.merge(x.entries[a].right, b)
		x.pull(a)
		return a
	}
	x.entries[b].left = x.merge(a, x.entries[b].left)
	x.pull(b)
	return b
}

// Take books a claim where Best or Scan put it; Give gives it back.
func (x *Index) Take(p Pick, a *Ask) { x.change(p, a, 1) }

// Give gives back what Take booked.
func (x *Index) Give(p Pick, a *Ask) { x.change(p, a, -1) }

func (x *Index) change(p Pick, a *Ask, sign int64) {
	x.removeHost(p.Host)
	h := &x.hosts[p.Host]
	if h.ram != Uncounted {
		h.ram -= sign * a.RAM
	}
	if h.cpu != Uncounted {
		h.cpu -= sign * a.CPU
	}
	free := x.gpus(p.Host)
	for rest := p.GPUs; rest != 0; rest &= rest - 1 {
		free[bits.TrailingZeros64(rest)] -= sign * a.VRAM
	}
	x.insertHost(p.Host)
}

// Class of a host.
func (x *Index) Class(h int) int { return int(x.hosts[h].class) }
