package scaledown

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"github.com/headrace/headrace/scheduler/cluster"
)

// unit is a group or a role's replica with what decides its turn.
type unit struct {
	ordinal int
	status  string
	cost    float64
	guarded bool
	why     string
}

func (u *unit) running() bool { return u.status == "" || u.status == cluster.Running }

// plan is what becomes of numbered units: not running first, then cost ascending, then ordinal descending, those below
// the partition last; units being deleted are neither survivors nor chosen again, and keep their ordinals.
func plan(units []unit, target, partition int, order string) (ranked []cluster.RankedGroup, remove, create, remain []int) {
	var used []int
	var alive []unit
	for _, u := range units {
		used = append(used, u.ordinal)
		if u.status != cluster.Deleting {
			alive = append(alive, u)
		}
	}
	slices.SortStableFunc(alive, func(a, b unit) int { return cmp.Compare(a.ordinal, b.ordinal) })
	for i := range alive[:min(partition, len(alive))] {
		alive[i].guarded = true
	}
	slices.SortStableFunc(alive, func(a, b unit) int {
		if a.guarded != b.guarded {
			return later(a.guarded)
		}
		if order != "ordinal" {
			if a.running() != b.running() {
				return later(a.running())
			}
			if a.cost != b.cost {
				return cmp.Compare(a.cost, b.cost)
			}
		}
		return cmp.Compare(b.ordinal, a.ordinal)
	})
	n := max(len(alive)-target, 0)
	remove, remain = []int{}, []int{}
	for i, u := range alive {
		status := u.status
		if status == "" {
			status = cluster.Running
		}
		ranked = append(ranked, cluster.RankedGroup{Ordinal: u.ordinal, Status: status, Cost: u.cost, Guarded: u.guarded, Why: u.why})
		if i < n {
			remove = append(remove, u.ordinal)
		} else {
			remain = append(remain, u.ordinal)
		}
	}
	slices.Sort(remain)
	return ranked, remove, Vacant(used, target-len(alive)), remain
}

// Serving plans a serving set: which groups go, which come, and the same for each role inside those that stay.
func Serving(s *cluster.Snapshot, set *cluster.Serving) cluster.ServingPlan {
	prices := PricesOf(s.Settings.Cost)
	out := cluster.ServingPlan{Name: set.Name}
	for _, r := range set.Roles {
		out.MinMember += r.Replicas * (1 + r.Workers)
	}
	occupied := occupancy(s, set)
	units := make([]unit, len(set.Groups))
	for i := range set.Groups {
		g := &set.Groups[i]
		units[i] = unit{ordinal: g.Ordinal, status: g.Status}
		units[i].cost, units[i].why = groupCost(s, prices, g, occupied)
	}
	alive := 0
	for _, u := range units {
		if u.status != cluster.Deleting {
			alive++
		}
	}
	target := alive
	if set.Replicas != nil {
		target = *set.Replicas
	}
	out.Order, out.Delete, out.Create, out.Remain = plan(units, target, set.Partition, set.Order)
	out.PodGroups = podGroups(set, out.Create)
	if len(out.Delete) > 0 {
		out.RemoveLast = "each one's PodGroup when its pods are gone"
	}
	for i := range set.Groups {
		if g := &set.Groups[i]; slices.Contains(out.Remain, g.Ordinal) {
			out.Roles = append(out.Roles, roles(prices, set, g, occupied, s)...)
		}
	}
	if set.Ratio != nil {
		p, d, why := Repair(set.Ratio)
		out.RatioFrom, out.RatioTo, out.RatioWhy = &[2]int{set.Ratio.Prefill, set.Ratio.Decode}, &[2]int{p, d}, why
	}
	return out
}

// roles plans the replicas of each role in a group. A role's share in the PodGroup is held while it is larger than it should be.
func roles(p Prices, set *cluster.Serving, g *cluster.ServingGroup, occupied map[string]map[int]int, s *cluster.Snapshot) []cluster.RolePlan {
	var out []cluster.RolePlan
	for _, want := range set.Roles {
		var units []unit
		for i := range g.Roles {
			if r := &g.Roles[i]; r.Role == want.Name {
				u := unit{ordinal: r.Ordinal, status: r.Status}
				u.cost, u.why = roleCost(s, p, r, occupied)
				units = append(units, u)
			}
		}
		if units == nil {
			continue // the snapshot does not look into this group
		}
		plan, remove, create, remain := plan(units, want.Replicas, 0, set.Order)
		r := cluster.RolePlan{Group: g.Ordinal, Role: want.Name, Order: plan, Delete: remove, Create: create, Remain: remain, MinTaskMember: want.Replicas * (1 + want.Workers)}
		if len(units) > want.Replicas {
			r.Held, r.MinTaskMember = true, len(units)*(1+want.Workers)
		}
		out = append(out, r)
	}
	return out
}

func groupCost(s *cluster.Snapshot, p Prices, g *cluster.ServingGroup, occupied map[string]map[int]int) (float64, string) {
	if g.Cost != nil {
		return *g.Cost, "annotated"
	}
	sum := 0.
	for i := range g.Roles {
		cost, _ := roleCost(s, p, &g.Roles[i], occupied)
		sum += cost
	}
	return sum, fmt.Sprintf("the sum of %d roles", len(g.Roles))
}

func roleCost(s *cluster.Snapshot, p Prices, r *cluster.GroupRole, occupied map[string]map[int]int) (float64, string) {
	if r.Cost != nil {
		return *r.Cost, "annotated"
	}
	sum := 0.
	for i := range r.Pods {
		pod := &r.Pods[i]
		if pod.DeletionCost != nil {
			sum += *pod.DeletionCost
			continue
		}
		work, _ := p.load(&pod.Load)
		sum += work - p.FreedGPU*freedBy(s, pod, occupied)
	}
	return sum, fmt.Sprintf("the sum of %d pods", len(r.Pods))
}

// occupancy counts who holds each GPU, pods and instances.
func occupancy(s *cluster.Snapshot, set *cluster.Serving) map[string]map[int]int {
	out := map[string]map[int]int{}
	hold := func(host string, gpus []int) {
		if out[host] == nil {
			out[host] = map[int]int{}
		}
		for _, g := range gpus {
			out[host][g]++
		}
	}
	for i := range s.Instances {
		for _, p := range s.Instances[i].Parts {
			hold(p.Host, p.GPUs)
		}
	}
	for i := range set.Groups {
		for j := range set.Groups[i].Roles {
			for _, pod := range set.Groups[i].Roles[j].Pods {
				hold(pod.Host, pod.GPUs)
			}
		}
	}
	return out
}

// freedBy is the share of a pod's host's GPUs that nobody would hold without it.
func freedBy(s *cluster.Snapshot, pod *cluster.Pod, occupied map[string]map[int]int) float64 {
	for i := range s.Hosts {
		h := &s.Hosts[i]
		if h.Name != pod.Host || len(h.GPUs) == 0 {
			continue
		}
		free := 0
		for _, g := range h.GPUs {
			others := occupied[h.Name][*g.Index]
			if slices.Contains(pod.GPUs, *g.Index) {
				others--
			}
			if others <= 0 {
				free++
			}
		}
		return float64(free) / float64(len(h.GPUs))
	}
	return 0
}

// podGroups names the PodGroups to update before pods are: those of all groups that exist or come. Their order is that of Kthena's
// name list (specs: docs/scheduling.md): first those past the end, each of which leaves one place less from 0 up, then the rest. The
// list is walked from its end: from its start, as there, several past the end would push names of groups out that exist.
func podGroups(set *cluster.Serving, create []int) []string {
	ordinals := slices.Clone(create)
	for _, g := range set.Groups {
		ordinals = append(ordinals, g.Ordinal)
	}
	slices.Sort(ordinals)
	inside := len(ordinals) // how many of them are not past the end
	for inside > 0 && ordinals[inside-1] > inside-1 {
		inside--
	}
	var out []string
	for _, o := range slices.Concat(ordinals[inside:], ordinals[:inside]) {
		out = append(out, set.Name+"-"+strconv.Itoa(o))
	}
	return out
}
