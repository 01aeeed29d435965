package snapfile

import (
	"github.com/headrace/headrace/scheduler/cluster"
)

// Bounds of a whole snapshot: what a short file may ask for by counts is bounded as what it lists one by one is.
const (
	hostsMax    = 200_000
	devicesMax  = 2_000_000
	tasksMax    = 1_000_000
	replicasMax = 1_000_000 // instances or groups asked for, of one model or set and of all
	membersMax  = 10_000    // of one gang
	totalMax    = 1 << 60   // bytes of memory that a file's instances, or its tasks, claim together: sums stay inside 64 bits
)

// bounds checks how much there is before counts are written out.
func bounds(d *decoder, s *cluster.Snapshot) {
	if len(s.Hosts) > hostsMax {
		d.problem(s.Hosts[hostsMax].Line, "%d hosts are more than %d; divide the snapshot by cluster", len(s.Hosts), hostsMax)
	}
	devices := 0
	for i := range s.Hosts {
		for _, g := range s.Hosts[i].GPUs {
			devices += min(max(g.Count, 1), gpusMax+1)
		}
		if devices > devicesMax {
			d.problem(s.Hosts[i].Line, "more than %d GPUs up to this host; divide the snapshot by cluster", devicesMax)
			break
		}
	}
	tasks := 0
	for i := range s.Jobs {
		for _, t := range s.Jobs[i].Tasks {
			if t.Count > tasksMax {
				d.problem(t.Line, "job %s: count is %d, more than %d", s.Jobs[i].Name, t.Count, tasksMax)
				return
			}
			tasks += max(t.Count, 1)
		}
		if tasks > tasksMax {
			d.problem(s.Jobs[i].Line, "more than %d tasks up to this job; divide the snapshot by queue", tasksMax)
			break
		}
	}
	asked(d, s)
}

// asked bounds instances, members and groups that are to be.
func asked(d *decoder, s *cluster.Snapshot) {
	all := 0
	more := func(n, line int, who string) {
		if n > replicasMax {
			d.problem(line, "%s: %d replicas are more than %d", who, n, replicasMax)
			return
		}
		if all += n; all > replicasMax && all-n <= replicasMax {
			d.problem(line, "%s: more than %d replicas up to here; divide the snapshot", who, replicasMax)
		}
	}
	for i := range s.Models {
		if m := &s.Models[i]; m.Replicas != nil {
			more(*m.Replicas, m.Line, "model "+m.Name)
		}
	}
	for i := range s.Serving {
		set := &s.Serving[i]
		if set.Replicas != nil {
			more(*set.Replicas, set.Line, "serving set "+set.Name)
		}
		for _, r := range set.Roles {
			more(max(r.Replicas, r.Workers), set.Line, "serving set "+set.Name+": role "+r.Name)
		}
	}
	for i := range s.Gangs {
		members := 0
		for _, m := range s.Gangs[i].Members {
			members += min(m.Count, membersMax+1)
		}
		if members > membersMax {
			d.problem(s.Gangs[i].Line, "gang %s: more than %d members; make several gangs of it", s.Gangs[i].Name, membersMax)
		}
	}
}

// totals checks that sums of claims cannot pass 64 bits.
func totals(d *decoder, s *cluster.Snapshot) {
	claimed := 0.
	add := func(bytes, n float64, line int, who string) {
		before := claimed
		if claimed += bytes * n; claimed > totalMax && before <= totalMax {
			d.problem(line, "%s: up to here more than 1EiB is claimed; correct the amounts or the counts", who)
		}
	}
	for i := range s.Instances {
		for _, p := range s.Instances[i].Parts {
			add(float64(p.RAM)+float64(p.VRAM)*float64(len(p.GPUs)), 1, s.Instances[i].Line, "instance "+s.Instances[i].Name)
		}
	}
	claims := make(map[string]float64, len(s.Models))
	for i := range s.Models {
		claims[s.Models[i].Name] = claimOf(&s.Models[i].Claim)
	}
	for i := range s.Models {
		m := &s.Models[i]
		n := 1.
		if m.Replicas != nil {
			n = float64(*m.Replicas)
		}
		add(claims[m.Name]+claims[m.Draft], n, m.Line, "model "+m.Name)
	}
	for _, g := range s.Gangs {
		for _, m := range g.Members {
			add(claims[m.Model], float64(m.Count), g.Line, "gang "+g.Name)
		}
	}
	for i := range s.Jobs {
		for _, t := range s.Jobs[i].Tasks {
			add(float64(t.Request.Memory), float64(max(t.Count, 1)), t.Line, "job "+s.Jobs[i].Name)
		}
	}
}

// claimOf is the most that an instance takes of RAM and GPU memory together.
func claimOf(c *cluster.Claim) float64 {
	sum := float64(c.RAM) + float64(c.VRAM) + float64(c.RAMCPU)
	if l := c.Layers; l != nil {
		sum += float64(l.Count)*float64(l.Weight+l.KV) + float64(l.Input) + float64(l.Output) + float64(l.Buffer)
	}
	return sum
}
