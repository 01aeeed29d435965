package snapfile

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/headrace/headrace/scheduler/cluster"
)

// check finds what a field alone does not show: names given twice, references to nothing, sums that cannot be.
func check(d *decoder, s *cluster.Snapshot) {
	hosts := checkHosts(d, s)
	models := names{d: d, what: "model"}
	for i := range s.Models {
		models.add(s.Models[i].Name, s.Models[i].Line)
	}
	checkModels(d, s, hosts, &models)
	gangs := names{d: d, what: "gang"}
	for _, g := range s.Gangs {
		gangs.add(g.Name, g.Line)
		total := 0
		for _, m := range g.Members {
			models.need(m.Model, g.Line, "gang "+g.Name)
			total += m.Count
		}
		if g.Min > total {
			d.problem(g.Line, "gang %s: min is %d and it has %d members; lower min or add members", g.Name, g.Min, total)
		}
	}
	checkInstances(d, s, hosts, &models)
	checkServing(d, s, hosts)
	checkJobs(d, s, hosts)
	for _, c := range s.Channels {
		hosts.need(c.From, c.Line, "channel")
		hosts.need(c.To, c.Line, "channel")
	}
	totals(d, s)
	for _, f := range s.ModelFiles {
		models.need(f.Model, f.Line, "model file")
		hosts.need(f.Host, f.Line, "model file")
	}
}

// names remembers where a name was given.
type names struct {
	d    *decoder
	what string
	at   map[string]int
}

func (n *names) add(name string, line int) {
	if name == "" {
		n.d.problem(line, "a %s has no name; give it one", n.what)
		return
	}
	if first, twice := n.at[name]; twice {
		n.d.problem(line, "%s %q stands already on line %d; names are unique, rename one", n.what, name, first)
		return
	}
	if n.at == nil {
		n.at = map[string]int{}
	}
	n.at[name] = line
}

func (n *names) need(name string, line int, who string) {
	if _, ok := n.at[name]; !ok {
		n.d.problem(line, "%s: there is no %s %q; add it or correct the name", who, n.what, name)
	}
}

func checkHosts(d *decoder, s *cluster.Snapshot) *names {
	hosts := &names{d: d, what: "host"}
	for i := range s.Hosts {
		h := &s.Hosts[i]
		hosts.add(h.Name, h.Line)
		if h.MemoryReserved+h.MemoryUsed > h.Memory {
			d.problem(h.Line, "host %s: %d bytes of memory are reserved or used and it has %d; correct one of them", h.Name, h.MemoryReserved+h.MemoryUsed, h.Memory)
		}
		if h.CPUUsed > h.CPU {
			d.problem(h.Line, "host %s: %s cores are used and it has %s; correct one of them", h.Name, h.CPUUsed, h.CPU)
		}
		for _, n := range h.Cards {
			if n > replicasMax {
				d.problem(h.Line, "host %s: %d cards of a name are more than %d", h.Name, n, replicasMax)
			}
		}
		if len(h.GPUs) > gpusMax {
			d.problem(h.Line, "host %s: more than %d GPUs", h.Name, gpusMax)
		}
		nics := map[string]bool{}
		for _, n := range h.NICs {
			if nics[n.Name] {
				d.problem(h.Line, "host %s: NIC %q stands there twice; rename one", h.Name, n.Name)
			}
			nics[n.Name] = true
		}
		index := map[int]bool{}
		for _, g := range h.GPUs {
			if index[*g.Index] {
				d.problem(h.Line, "host %s: GPU %d stands there twice; give each its own index", h.Name, *g.Index)
			}
			index[*g.Index] = true
			if g.Reserved+g.Used > g.Memory {
				d.problem(h.Line, "host %s: GPU %d has %d bytes reserved or used of %d; correct one of them", h.Name, *g.Index, g.Reserved+g.Used, g.Memory)
			}
			for _, n := range g.NICs {
				if !nics[n] {
					d.problem(h.Line, "host %s: GPU %d names NIC %q, which the host does not list", h.Name, *g.Index, n)
				}
			}
		}
	}
	return hosts
}

// SplitGPU takes "host:index" apart.
func SplitGPU(name string) (host string, index int, err error) {
	at := strings.LastIndexByte(name, ':')
	if at <= 0 {
		return "", 0, fmt.Errorf("%q names no GPU; write host:index", name)
	}
	index, err = strconv.Atoi(name[at+1:])
	if err != nil || index < 0 {
		return "", 0, fmt.Errorf("%q names no GPU; write host:index", name)
	}
	return name[:at], index, nil
}

func checkModels(d *decoder, s *cluster.Snapshot, hosts, models *names) {
	gpus := map[string]bool{}
	for i := range s.Hosts {
		for _, g := range s.Hosts[i].GPUs {
			gpus[s.Hosts[i].Name+":"+strconv.Itoa(*g.Index)] = true
		}
	}
	for i := range s.Models {
		m := &s.Models[i]
		who := "model " + m.Name
		for _, name := range m.GPUs {
			host, _, err := SplitGPU(name)
			if err != nil {
				d.problem(m.Line, "%s: %v", who, err)
				continue
			}
			hosts.need(host, m.Line, who)
			if _, ok := hosts.at[host]; ok && !gpus[name] {
				d.problem(m.Line, "%s: host %s has no GPU of that index (%s)", who, host, name)
			}
		}
		for _, other := range []string{m.Pair, m.Draft} {
			if other != "" {
				models.need(other, m.Line, who)
			}
		}
		if m.Draft == m.Name && m.Draft != "" {
			d.problem(m.Line, "%s drafts for itself; name another model", who)
		}
		if q := m.Claim.GPUShare; q != nil && *q > 1 {
			d.problem(m.Line, "%s: gpu_share is %v; it is a share, at most 1", who, *q)
		}
		if m.Claim.GPUsEach > gpusMax*16 {
			d.problem(m.Line, "%s: gpus_each is %d, more than %d", who, m.Claim.GPUsEach, gpusMax*16)
		}
		if l := m.Claim.Layers; l != nil && l.Count > 10000 {
			d.problem(m.Line, "%s: %d layers are more than 10000", who, l.Count)
		}
	}
}

func checkInstances(d *decoder, s *cluster.Snapshot, hosts, models *names) {
	instances := names{d: d, what: "instance"}
	gpus := map[string]map[int]bool{}
	for i := range s.Hosts {
		at := map[int]bool{}
		for _, g := range s.Hosts[i].GPUs {
			at[*g.Index] = true
		}
		gpus[s.Hosts[i].Name] = at
	}
	for i := range s.Instances {
		n := &s.Instances[i]
		instances.add(n.Name, n.Line)
		models.need(n.Model, n.Line, "instance "+n.Name)
		if n.Host != "" && len(n.Parts) > 0 && n.Host != n.Parts[0].Host {
			d.problem(n.Line, "instance %s: it has a host and parts; say it once", n.Name)
		}
		for _, p := range n.Parts {
			hosts.need(p.Host, n.Line, "instance "+n.Name)
			twice := map[int]bool{}
			for _, g := range p.GPUs {
				if at, ok := gpus[p.Host]; ok && !at[g] {
					d.problem(n.Line, "instance %s: host %s has no GPU %d", n.Name, p.Host, g)
				}
				if twice[g] {
					d.problem(n.Line, "instance %s: GPU %d of host %s stands there twice; remove one", n.Name, g, p.Host)
				}
				twice[g] = true
			}
		}
	}
}

func checkServing(d *decoder, s *cluster.Snapshot, hosts *names) {
	sets := names{d: d, what: "serving set"}
	for i := range s.Serving {
		set := &s.Serving[i]
		who := "serving set " + set.Name
		sets.add(set.Name, set.Line)
		roles := names{d: d, what: "role"}
		for _, r := range set.Roles {
			roles.add(r.Name, set.Line)
		}
		ordinals := map[int]bool{}
		for j := range set.Groups {
			g := &set.Groups[j]
			if ordinals[g.Ordinal] {
				d.problem(g.Line, "%s: group %d stands there twice", who, g.Ordinal)
			}
			ordinals[g.Ordinal] = true
			checkGroup(d, g, who, &roles, hosts)
		}
		checkRatio(d, set.Ratio, set.Line, who)
	}
}

func checkGroup(d *decoder, g *cluster.ServingGroup, who string, roles, hosts *names) {
	type replica struct {
		role    string
		ordinal int
	}
	seen := map[replica]bool{}
	for _, r := range g.Roles {
		if len(roles.at) > 0 {
			roles.need(r.Role, g.Line, fmt.Sprintf("%s: group %d", who, g.Ordinal))
		}
		if len(roles.at) > 0 && seen[replica{r.Role, r.Ordinal}] {
			d.problem(g.Line, "%s: group %d has role %s %d twice; give each its own ordinal", who, g.Ordinal, r.Role, r.Ordinal)
		}
		seen[replica{r.Role, r.Ordinal}] = true
		for _, p := range r.Pods {
			if p.Host != "" && len(hosts.at) > 0 {
				hosts.need(p.Host, p.Line, who+": pod "+p.Name)
			}
		}
	}
}

func checkRatio(d *decoder, r *cluster.PDRatio, line int, who string) {
	switch {
	case r == nil:
		return
	case r.Max.Set() && r.Min.Rat().Cmp(r.Max.Rat()) > 0:
		d.problem(line, "%s: the ratio's min %s is more than its max %s", who, r.Min, r.Max)
	case r.PrefillMax > 0 && r.PrefillMin > r.PrefillMax:
		d.problem(line, "%s: prefill_min %d is more than prefill_max %d", who, r.PrefillMin, r.PrefillMax)
	case r.DecodeMax > 0 && r.DecodeMin > r.DecodeMax:
		d.problem(line, "%s: decode_min %d is more than decode_max %d", who, r.DecodeMin, r.DecodeMax)
	case max(r.Prefill, r.Decode, r.PrefillMin, r.PrefillMax, r.DecodeMin, r.DecodeMax) > replicasMax:
		d.problem(line, "%s: the ratio has a number above %d", who, replicasMax)
	}
}

func checkJobs(d *decoder, s *cluster.Snapshot, hosts *names) {
	queues := names{d: d, what: "queue"}
	for _, q := range s.Queues {
		queues.add(q.Name, q.Line)
	}
	jobs := names{d: d, what: "job"}
	for i := range s.Jobs {
		j := &s.Jobs[i]
		jobs.add(j.Name, j.Line)
		queues.need(j.Queue, j.Line, "job "+j.Name)
		tasks := 0
		named := names{d: d, what: "task of job " + j.Name}
		for _, t := range j.Tasks {
			if t.Name != "" {
				named.add(t.Name, t.Line)
			}
			tasks += max(t.Count, 1)
			if t.Host != "" {
				hosts.need(t.Host, t.Line, "job "+j.Name)
			} else if t.State == cluster.Running || t.State == "releasing" {
				d.problem(t.Line, "job %s: a task is %s and names no host; add host", j.Name, t.State)
			}
		}
		if j.MinAvailable > tasks {
			d.problem(j.Line, "job %s: min_available is %d and it has %d tasks", j.Name, j.MinAvailable, tasks)
		}
	}
}
