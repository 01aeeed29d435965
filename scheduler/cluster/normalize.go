package cluster

// GPUsMax is how many devices one host may have.
const GPUsMax = 64

// Normalize writes out what stands for several things: equal GPUs by count, their indexes, cards and vendors, a gang's members
// without a count, and instances of one part. The other packages want it done; doing it twice changes nothing.
func (s *Snapshot) Normalize() {
	for i := range s.Hosts {
		h := &s.Hosts[i]
		var all []GPU
		for _, g := range h.GPUs {
			n := max(g.Count, 1)
			g.Count = 0
			for range min(n, GPUsMax+1) {
				all = append(all, g)
			}
		}
		for j := range all {
			if all[j].Index == nil {
				index := j
				all[j].Index = &index
			}
			if all[j].Card == "" {
				all[j].Card = all[j].Model
			}
			if all[j].Vendor == "" {
				all[j].Vendor = "cuda"
			}
		}
		h.GPUs = all
	}
	for i := range s.Gangs {
		for j := range s.Gangs[i].Members {
			if m := &s.Gangs[i].Members[j]; m.Count == 0 {
				m.Count = 1
			}
		}
	}
	for i := range s.Instances {
		n := &s.Instances[i]
		if n.Host != "" && len(n.Parts) == 0 {
			n.Parts = []Part{{Host: n.Host, CPU: n.CPU, RAM: n.RAM, VRAM: n.VRAM, GPUs: n.GPUs}}
		}
	}
}
