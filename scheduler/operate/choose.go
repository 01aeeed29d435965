package operate

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/headrace/headrace/scheduler/cluster"
	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/place"
	"github.com/headrace/headrace/scheduler/planner"
	"github.com/headrace/headrace/scheduler/scaledown"
)

// roles are those that engines have here, in the order in which they are started.
func (o *Operator) roles() []string {
	if o.cfg.Limits.Undivided {
		return []string{connector.Whole}
	}
	return []string{connector.Prefill, connector.Decode}
}

// backend is how engines are placed here: on as many of the connector's slots as they take, all on one machine.
const backend = "planned"

// snapshot is this cluster in the scheduler's words: a host whose GPUs are the connector's slots, and the engines on them.
func (o *Operator) snapshot(c *connector.Cluster, seen *Seen) *cluster.Snapshot {
	none := 0.0
	s := &cluster.Snapshot{Hosts: []cluster.Host{{Name: c.Host, Memory: cluster.Bytes(c.FreeRAM)}}}
	s.Settings.Backends = map[string]cluster.Backend{backend: {OneGPU: true, SeveralGPUs: true}}
	for i := range c.Slots {
		s.Hosts[0].GPUs = append(s.Hosts[0].GPUs, cluster.GPU{Index: &i, Memory: 1})
	}
	for _, role := range o.roles() {
		n := o.each(role)
		s.Models = append(s.Models, cluster.Model{Name: role, Backend: backend, ScaleDown: cluster.ScaleDown{Order: "cost"},
			Claim: cluster.Claim{VRAM: cluster.Bytes(n), GPUShare: &none, GPUsEach: n, RAM: cluster.Bytes(c.EngineRAM)}})
	}
	add := func(name, role, phase string, gpus []string, l load) {
		states := map[string]string{Starting: cluster.Creating, Ready: cluster.Running, Draining: cluster.Draining, Stopping: cluster.Deleting}
		x := cluster.Instance{Name: name, Model: role, State: states[phase], Host: c.Host, VRAM: 1, Load: cluster.Load{InFlight: int(l.of(role))}}
		if _, n, ok := strings.Cut(name, "-"); ok {
			if i, err := strconv.Atoi(n); err == nil {
				x.Ordinal = &i
			}
		}
		for _, g := range gpus {
			if i := slices.Index(c.Slots, g); i >= 0 {
				x.GPUs = append(x.GPUs, i)
			}
		}
		s.Instances = append(s.Instances, x)
	}
	for _, r := range o.state.Engines {
		add(r.Name, r.Role, r.Phase, r.GPUs, seen.load(r.ID))
	}
	for i := range c.Engines {
		if e := &c.Engines[i]; o.record(e.Name) == nil { // somebody else's, or one that a person drains
			add(e.Name, e.Role, Stopping, e.GPUs, load{})
		}
	}
	s.Normalize()
	return s
}

// fits says which of the pools wanted can be placed beside what there is, and why not all.
func (o *Operator) fits(c *connector.Cluster, seen *Seen, had, want planner.Pools) (planner.Pools, string) {
	why := ""
	if wait := o.state.HoldUntil.Sub(o.now()); wait > 0 {
		why = fmt.Sprintf("a start failed, the next is tried in %s at the soonest", wait.Round(wait/10+1))
		return least(had, want), why
	}
	if c.Slots == nil { // not counted here
		return want, ""
	}
	st, err := place.NewState(o.snapshot(c, seen))
	if err != nil {
		return least(had, want), err.Error()
	}
	for {
		var members []cluster.Member
		most, more := "", 0
		for _, role := range o.roles() {
			if n := *in(&want, role) - *in(&had, role); n > 0 {
				members = append(members, cluster.Member{Model: role, Count: n})
				if n > more {
					most, more = role, n
				}
			}
		}
		if most == "" {
			return want, why
		}
		plan := st.Gang("", members, nil)
		if plan.Placed {
			return want, why
		}
		if why == "" {
			why = plan.Why
		}
		*in(&want, most)--
	}
}

func least(a, b planner.Pools) planner.Pools {
	return planner.Pools{Prefill: min(a.Prefill, b.Prefill), Decode: min(a.Decode, b.Decode), Whole: min(a.Whole, b.Whole)}
}

// leave chooses the engines that go, and says why those: the cheapest to lose go first.
func (o *Operator) leave(c *connector.Cluster, seen *Seen, want planner.Pools) (names, why []string) {
	s := o.snapshot(c, seen)
	for i := range s.Models {
		n := *in(&want, s.Models[i].Name)
		s.Models[i].Replicas = &n
	}
	st, err := place.NewState(s)
	if err != nil {
		o.log.Error("choose who leaves", "err", err)
		return nil, nil
	}
	for i := range s.Models {
		ranking, _ := scaledown.Model(st, s, &s.Models[i])
		for _, x := range ranking.Instances {
			if x.Remove {
				names = append(names, x.Instance)
				why = append(why, x.Instance+": "+x.Why)
			}
		}
	}
	return names, why
}

// vacant names new engines of a role: the lowest numbers that no engine has.
func (o *Operator) vacant(c *connector.Cluster, role string, n int) []string {
	prefix := role
	if role == connector.Whole {
		prefix = "engine"
	}
	var used []int
	note := func(name string) {
		if rest, ok := strings.CutPrefix(name, prefix+"-"); ok {
			if i, err := strconv.Atoi(rest); err == nil {
				used = append(used, i)
			}
		}
	}
	for _, r := range o.state.Engines {
		note(r.Name)
	}
	for _, e := range c.Engines {
		note(e.Name)
	}
	var names []string
	for _, i := range scaledown.Vacant(used, n) {
		names = append(names, fmt.Sprintf("%s-%d", prefix, i))
	}
	return names
}
