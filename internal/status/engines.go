package status

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/sidecar"
)

// Attached is an engine, or a rank of one, as its node daemon knows it.
type Attached struct {
	EngineID string          `json:"engine_id"`
	MemberOf string          `json:"member_of,omitempty"`
	Leases   int             `json:"leases"`
	About    json.RawMessage `json:"about,omitempty"`
	Regions  []struct {
		Bytes  uint64 `json:"bytes"`
		Kind   string `json:"kind"`
		Reason string `json:"reason,omitempty"`
	} `json:"regions,omitempty"`
}

// Figures are what an engine of another kind says in its metrics; nil fields are not told.
type Figures struct {
	Running    *int     `json:"running,omitempty"`
	Waiting    *int     `json:"waiting,omitempty"`
	CacheUsage *float64 `json:"cache_usage,omitempty"`
}

// whole counts engines, not their ranks.
func (s *NodeStatus) whole() int {
	n := 0
	for _, e := range s.Engines {
		if e.MemberOf == "" {
			n++
		}
	}
	return n
}

// foreign tells engines of other kinds from Headrace's own, whose /status they have not.
func foreign(w *registry.Worker) bool {
	return w.Dialect != "" && w.Dialect != sidecar.DialectNative
}

func askEngine(ctx context.Context, client *http.Client, addr string) (*Figures, string) {
	ask := &sidecar.Asker{Base: "http://" + addr, Client: client}
	if err := ask.Health(ctx); err != nil {
		return nil, err.Error()
	}
	f, err := ask.Figures(ctx)
	if err != nil {
		return nil, err.Error()
	}
	out := &Figures{}
	out.Running, out.Waiting = told(f.Running), told(f.Waiting)
	if f.CacheUsage >= 0 {
		out.CacheUsage = &f.CacheUsage
	}
	return out, ""
}

func told(v float64) *int {
	if v < 0 || v > math.MaxInt32 {
		return nil
	}
	n := int(v)
	return &n
}

func count(v *int) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprint(*v)
}

// blocks are used, free, leased and all, as far as they are told.
func (f *Figures) blocks(all uint32) string {
	if all == 0 {
		return "-"
	}
	if f.CacheUsage == nil {
		return fmt.Sprintf("-/-/-/%d", all)
	}
	used := uint32(math.Round(*f.CacheUsage * float64(all)))
	return fmt.Sprintf("%d/%d/-/%d", used, all-min(used, all), all)
}

// printEngines is for engines of other kinds: what they said of themselves, and what their node daemons hold of them.
func (r *Report) printEngines(t io.Writer) {
	first := true
	for _, w := range r.Workers {
		if !foreign(&w.Worker) {
			continue
		}
		if first {
			fmt.Fprintf(t, "\nENGINE\tIS\tDIALECT\tBLOCK\tCONTEXT\tRANKS\tLENT\tLEASES\tFINGERPRINT\tKV EVENTS\tLAYOUT\n")
			first = false
		}
		lent, leases := r.lent(w.ID)
		layout := orDash(w.Layout)
		if w.Opaque && !strings.Contains(layout, "opaque") {
			layout += ", opaque"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", w.ID, orDash(w.Engine), w.Dialect, tokens(w.BlockTokens), tokens(w.ContextTokens),
			numberOrDash(int(w.TensorParallel), w.TensorParallel > 0), lent, leases, orDash(fmt.Sprintf("%.12s", w.Fingerprint)), w.events(), layout)
	}
}

// events says where KV events are published, and what a router has of them.
func (w *Worker) events() string {
	if w.Events == "" || w.Collected == nil || len(w.Collected.Events) == 0 {
		return orDash(w.Events)
	}
	blocks, state := int64(0), ""
	for _, e := range w.Collected.Events {
		blocks += e.Blocks
		if state == "" || state == "following" {
			state = e.State // the worst is what matters
		}
	}
	return fmt.Sprintf("%s (%s, %d blocks)", w.Events, state, blocks)
}

func tokens(n uint32) string { return numberOrDash(int(n), n > 0) }

// lent says what a node daemon has of an engine and all its ranks.
func (r *Report) lent(id string) (memory, leases string) {
	var bytes uint64
	var kinds []string
	regions := 0
	leases = "-"
	for _, n := range r.Nodes {
		if n.Status == nil {
			continue
		}
		for _, e := range n.Status.Engines {
			if e.EngineID == id {
				leases = fmt.Sprint(e.Leases)
			} else if e.MemberOf != id {
				continue
			}
			for _, x := range e.Regions {
				bytes, regions = bytes+x.Bytes, regions+1
				kind := x.Kind
				if x.Reason != "" {
					kind += ": " + x.Reason
				}
				if kind != "" && !strings.Contains(strings.Join(kinds, "; "), kind) {
					kinds = append(kinds, kind)
				}
			}
		}
	}
	if regions == 0 {
		return "-", leases
	}
	return fmt.Sprintf("%s in %d (%s)", humanBytes(float64(bytes)), regions, strings.Join(kinds, "; ")), leases
}
