package place

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/headrace/headrace/scheduler/cluster"
)

// gangSteps bounds the search for a gang's placement, in looks at 8 candidates.
const gangSteps = 20_000

// GangResult is what became of a gang.
type GangResult struct {
	Placed     bool
	Why        string
	Placements []cluster.Placement
	// Denied is the first member that had no place, with what the filters and the fit say of it; nil where all have one.
	Denied *cluster.Denial
	// Exhausted says that the search ended at its bound, not at the last possibility.
	Exhausted bool
}

// Gang places all members or none, booking nothing: what is hard to place comes first, and where a choice leaves no room for a
// later member, the next best is tried. names gives an instance's name for a model; nil numbers them.
func (st *State) Gang(gang string, members []cluster.Member, names func(model string) string) GangResult {
	var todo []*cluster.Model
	for _, m := range members {
		model := st.models[m.Model]
		if model == nil {
			return GangResult{Why: "there is no model " + m.Model}
		}
		for range m.Count {
			todo = append(todo, model)
		}
	}
	if names == nil {
		n := 0
		names = func(model string) string { n++; return fmt.Sprintf("%s?%d", model, n) }
	}
	slices.SortStableFunc(todo, func(a, b *cluster.Model) int { return cmp.Compare(st.demand(b), st.demand(a)) })
	s := gangSearch{st: st, todo: todo, gang: gang, steps: gangSteps}
	needs := map[*cluster.Model]*need{}
	for _, m := range todo {
		if needs[m] == nil {
			n := st.needOf(m)
			needs[m] = &n
		}
		s.names, s.needs = append(s.names, names(m.Name)), append(s.needs, needs[m])
	}
	s.tell()
	ok := s.from(0)
	for _, p := range s.done {
		st.Remove(p.Instance)
	}
	if !ok {
		why := s.why
		if s.steps <= 0 {
			why += fmt.Sprintf("; the search ended after %d steps", gangSteps)
		}
		return GangResult{Why: why, Denied: s.denied, Exhausted: s.steps <= 0}
	}
	return GangResult{Placed: true, Why: fmt.Sprintf("all %d members have a place", len(todo)), Placements: s.done}
}

// demand orders members: several GPUs before one, much memory before little.
func (st *State) demand(m *cluster.Model) float64 {
	n := st.needOf(m)
	return float64(max(n.each, 1))*1e18*n.share + float64(n.vram) + float64(n.ram)/1e3
}

// gangSearch goes through the members, and through each one's candidates, depth first. What failed is remembered by the room that was
// left: hosts that nothing tells apart but their room are not tried one after the other, nor members in another order.
type gangSearch struct {
	st     *State
	todo   []*cluster.Model
	needs  []*need // of each of todo, one for a model
	names  []string
	gang   string
	done   []cluster.Placement
	why    string
	denied *cluster.Denial
	steps  int

	kinds   []int    // by host: equal ones differ in their room alone
	devices [][]int  // by host and GPU: the same
	rooms   []uint64 // by host: a hash of its kind and its room
	sum     uint64   // of rooms
	failed  map[gangState]bool
}

// gangState is a point of the search: the next member, and the room on all hosts, whichever has it.
type gangState struct {
	member int
	rooms  uint64
}

// tell finds out which hosts nothing tells apart.
func (s *gangSearch) tell() {
	named := slices.ContainsFunc(s.todo, func(m *cluster.Model) bool { return len(m.GPUs) > 0 })
	s.failed = map[gangState]bool{}
	kinds := map[string]int{}
	kind := func(text string) int {
		if _, ok := kinds[text]; !ok {
			kinds[text] = len(kinds)
		}
		return kinds[text]
	}
	for i := range s.st.hosts {
		h := &s.st.hosts[i]
		text := fmt.Sprintf("%q %q %v %v", h.Cluster, h.State, h.Memory > 0, h.Host.CPU > 0)
		for _, k := range slices.Sorted(maps.Keys(h.Labels)) {
			text += fmt.Sprintf(" %q=%q", k, h.Labels[k])
		}
		for _, n := range h.NICs {
			text += fmt.Sprintf(" nic %q", n.Fabric)
		}
		devices := make([]int, len(h.gpus))
		for j := range h.gpus {
			g := &h.gpus[j]
			device := fmt.Sprintf(" gpu %q %q %d %d", g.GPU.Model, g.Vendor, g.Memory, g.NUMA)
			if named {
				device += fmt.Sprintf(" %d", *g.Index)
			}
			devices[j] = kind(device)
			text += device
		}
		if named {
			text += fmt.Sprintf(" %q", h.Name)
		}
		s.kinds, s.devices = append(s.kinds, kind(text)), append(s.devices, devices)
		s.rooms = append(s.rooms, s.room(i))
		s.sum += s.rooms[i]
	}
}

// room is a hash of what a host has left; devices of a kind may change places.
func (s *gangSearch) room(i int) uint64 {
	h := &s.st.hosts[i]
	sum := mix(mix(mix(0, uint64(s.kinds[i])), uint64(h.freeRAM)), uint64(h.freeCPU))
	for j := range h.gpus {
		sum += mix(uint64(s.devices[i][j]), uint64(h.gpus[j].free))
	}
	return mix(sum, 0)
}

// mix is a step of splitmix64.
func mix(h, v uint64) uint64 {
	h ^= v + 0x9e3779b97f4a7c15 + h<<6
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// changed takes note of what an instance takes or gives back.
func (s *gangSearch) changed(uses []cluster.Use) {
	for _, u := range uses {
		i := s.st.byName[u.Host]
		now := s.room(i)
		s.sum += now - s.rooms[i]
		s.rooms[i] = now
	}
}

// tooMany is a quick no: the members from i on must take more GPUs than there are places for the smallest claim among theirs.
func (s *gangSearch) tooMany(i int) bool {
	var smallest []*need // what is left of each kind
	least := 0           // GPUs that the members must have
	for ; i < len(s.todo); i++ {
		n := s.needs[i]
		if n.share <= 0 && n.each == 0 || n.backend.CPU || n.backend.Partial {
			return false // it may take of many a little, or none at all
		}
		least += max(n.each, 1)
		if !slices.Contains(smallest, n) {
			smallest = append(smallest, n)
		}
	}
	places := int64(0)
	for h := range s.st.hosts {
		for g := range s.st.hosts[h].gpus {
			d, claim := &s.st.hosts[h].gpus[g], int64(math.MaxInt64)
			for _, n := range smallest {
				c, _ := n.onGPU(d, max(n.each, 1))
				claim = min(claim, max(c, 1))
			}
			places += max(d.free, 0) / claim
		}
		if places >= int64(least) {
			return false
		}
	}
	return true
}

func (s *gangSearch) from(i int) bool {
	if i == len(s.todo) {
		return true
	}
	at := gangState{member: i, rooms: s.sum}
	if s.failed[at] || s.denied != nil && s.tooMany(i) { // the first way is gone to its end, for a reason to tell
		return false
	}
	p, denied := s.st.Place(s.todo[i], s.names[i])
	if denied != nil {
		s.steps--
		if s.denied == nil {
			s.denied = denied
			s.why = fmt.Sprintf("%s (%d of %d): %s", s.names[i], i+1, len(s.todo), denied.Reason)
		}
		s.failed[at] = true
		return false
	}
	s.steps -= 1 + len(p.Candidates)/8
	p.Gang = s.gang
	for c := range p.Candidates {
		next := *p
		next.Candidate = p.Candidates[c]
		if c > 0 {
			next.Why = fmt.Sprintf("%s: number %d by score; with a better one the gang has no place", p.Stage, c+1)
		}
		s.st.Add(&next)
		s.changed(next.Uses)
		s.done = append(s.done, next)
		if s.from(i + 1) {
			return true
		}
		s.st.Remove(next.Instance)
		s.changed(next.Uses)
		s.done = s.done[:len(s.done)-1]
		if s.steps <= 0 || s.tooMany(i) {
			return false
		}
	}
	s.failed[at] = true
	return false
}
