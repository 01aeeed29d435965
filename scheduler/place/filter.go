package place

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/headrace/headrace/scheduler/cluster"
)

// filters are what is looked at before resources, in GPUStack's order. A test answers "" for a host that stays.
var filters = []struct {
	name string
	out  func(st *State, m *cluster.Model, h *host) string
}{
	{"cluster", func(_ *State, m *cluster.Model, h *host) string {
		if m.Cluster != "" && m.Cluster != h.Cluster {
			return fmt.Sprintf("it is in cluster %q, the model wants %q", h.Cluster, m.Cluster)
		}
		return ""
	}},
	{"gpus", func(_ *State, m *cluster.Model, h *host) string {
		if len(m.GPUs) > 0 && !slices.ContainsFunc(m.GPUs, func(g string) bool {
			return strings.HasPrefix(g, h.Name+":") && !strings.Contains(g[len(h.Name)+1:], ":")
		}) {
			return "none of the GPUs named is here"
		}
		return ""
	}},
	{"labels", func(_ *State, m *cluster.Model, h *host) string {
		for _, k := range slices.Sorted(maps.Keys(m.Selector)) {
			if have, ok := h.Labels[k]; !ok || have != m.Selector[k] {
				return fmt.Sprintf("label %s is %q, wanted %q", k, have, m.Selector[k])
			}
		}
		return ""
	}},
	{"state", func(_ *State, _ *cluster.Model, h *host) string {
		if !h.Usable() {
			return "it is " + h.State
		}
		return ""
	}},
	{"backend", backendFilter},
	{"local_path", func(_ *State, m *cluster.Model, h *host) string {
		if m.LocalPath != "" && len(m.GPUs) > 0 && !slices.Contains(h.Paths, m.LocalPath) {
			return "it has no " + m.LocalPath
		}
		return ""
	}},
}

// backendFilter takes out hosts without an accelerator that the backend can use, unless it can do without.
func backendFilter(st *State, m *cluster.Model, h *host) string {
	b := st.set.Backends[backendName(m)]
	if b.CPU && len(m.GPUs) == 0 {
		return ""
	}
	for i := range h.gpus {
		if usable(b, m, h.gpus[i].Vendor) {
			return ""
		}
	}
	if len(h.gpus) == 0 {
		return "it has no GPU and " + backendName(m) + " needs one"
	}
	return fmt.Sprintf("%s cannot use its accelerators (%s)", backendName(m), h.gpus[0].Vendor)
}

func usable(b cluster.Backend, m *cluster.Model, vendor string) bool {
	return (len(b.Vendors) == 0 || slices.Contains(b.Vendors, vendor)) && (len(m.Vendors) == 0 || slices.Contains(m.Vendors, vendor))
}

// filter runs the chain and reports what each filter did.
func (st *State) filter(m *cluster.Model) ([]*host, []cluster.Filter) {
	left := make([]*host, len(st.hosts))
	for i := range st.hosts {
		left[i] = &st.hosts[i]
	}
	report := make([]cluster.Filter, 0, len(filters))
	for _, f := range filters {
		r := cluster.Filter{Name: f.name}
		kept := left[:0:0]
		for _, h := range left {
			if why := f.out(st, m, h); why != "" {
				r.Out = append(r.Out, cluster.Reject{Host: h.Name, Why: why})
				continue
			}
			kept = append(kept, h)
		}
		left, r.Left = kept, len(kept)
		report = append(report, r)
	}
	return left, report
}

// allowed lists the GPUs of a host that the model may take: of a usable kind and, where GPUs are named, one of them.
func (st *State) allowed(m *cluster.Model, h *host) []*gpu {
	b := st.set.Backends[backendName(m)]
	var list []*gpu
	for i := range h.gpus {
		g := &h.gpus[i]
		if usable(b, m, g.Vendor) && (len(m.GPUs) == 0 || slices.Contains(m.GPUs, h.Name+":"+strconv.Itoa(*g.Index))) {
			list = append(list, g)
		}
	}
	return list
}
