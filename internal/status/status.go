// Package status gathers what the parts say of themselves, from the registry and from each part's own pages, and
// writes it for people. It must not change anything, nor need a part to answer: one that does not is shown as such.
package status

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/headrace/headrace/internal/adminpage"
	"github.com/headrace/headrace/internal/clusterauth"
	"github.com/headrace/headrace/internal/registry"
)

// Report is everything `headrace status` shows, and its --json document.
type Report struct {
	Etcd    []string `json:"etcd"`
	Routers []Router `json:"routers"`
	Workers []Worker `json:"workers"`
	Nodes   []Node   `json:"nodes"`
	// Planners decide how many workers there are.
	Planners []Planner `json:"planners,omitempty"`
}

// Router is a listed router. Error says why its own page is missing.
type Router struct {
	registry.Router
	Status json.RawMessage `json:"status,omitempty"`
	Error  string          `json:"error,omitempty"`
}

// Gather asks every listed part at once, routers with the cluster key of ctx (clusterauth.WithKey) if there is one.
func Gather(ctx context.Context, endpoints []string, view *registry.View) *Report {
	r := &Report{
		Etcd: endpoints, Routers: make([]Router, len(view.Routers)),
		Workers: make([]Worker, len(view.Workers)), Nodes: make([]Node, len(view.Nodes)), Planners: make([]Planner, len(view.Planners)),
	}
	client := &http.Client{Timeout: adminpage.Timeout, Transport: &http.Transport{DisableKeepAlives: true}}
	signing := &http.Client{Timeout: adminpage.Timeout, Transport: &clusterauth.Transport{Base: client.Transport}}
	var wg sync.WaitGroup
	for i, n := range view.Nodes {
		wg.Go(func() {
			r.Nodes[i].Node = n
			r.Nodes[i].Status, r.Nodes[i].Error = ask[*NodeStatus](ctx, client, n.Admin)
		})
	}
	for i, w := range view.Workers {
		wg.Go(func() {
			r.Workers[i].Worker = w
			if foreign(&w) {
				r.Workers[i].Figures, r.Workers[i].Error = askEngine(ctx, client, w.Addr)
				return
			}
			r.Workers[i].Status, r.Workers[i].Error = ask[*WorkerStatus](ctx, client, w.Addr)
		})
	}
	for i, x := range view.Routers {
		wg.Go(func() {
			r.Routers[i].Router = x
			r.Routers[i].Status, r.Routers[i].Error = ask[json.RawMessage](ctx, signing, x.Admin)
		})
	}
	for i, p := range view.Planners {
		wg.Go(func() {
			r.Planners[i].Planner = p
			r.Planners[i].Status, r.Planners[i].Error = ask[*PlannerStatus](ctx, client, p.Admin)
		})
	}
	wg.Wait()
	r.spread()
	return r
}

// spread gives each worker what the router that looked last heard of it.
func (r *Report) spread() {
	best, alone := map[string]*Collected{}, map[string]string{}
	for _, x := range r.Routers {
		var s struct {
			Workers []struct {
				ID      string     `json:"id"`
				Engine  *Collected `json:"engine"`
				Cooling string     `json:"cooling"`
			} `json:"workers"`
		}
		if json.Unmarshal(x.Status, &s) != nil {
			continue // it is shown as it came
		}
		for _, w := range s.Workers {
			if w.Cooling != "" {
				alone[w.ID] = w.Cooling + " (" + x.ID + ")"
			}
			if old := best[w.ID]; w.Engine != nil && (old == nil || old.Stale && !w.Engine.Stale || old.Stale == w.Engine.Stale && w.Engine.AgeMS < old.AgeMS) {
				best[w.ID] = w.Engine
			}
		}
	}
	for i := range r.Workers {
		r.Workers[i].Collected, r.Workers[i].LeftAlone = best[r.Workers[i].ID], alone[r.Workers[i].ID]
	}
}

// ask reads a part's /status.
func ask[T any](ctx context.Context, client *http.Client, addr string) (v T, problem string) {
	if err := adminpage.Get(ctx, client, addr, "/status", &v); err != nil {
		return v, err.Error()
	}
	return v, ""
}

// Print writes the report: tables, or with asJSON the document.
func (r *Report) Print(w io.Writer, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	r.printRouters(t)
	r.printPlanners(t)
	r.printWorkers(t)
	r.printEngines(t)
	r.printNodes(t)
	r.printChannels(t)
	r.printRails(t)
	r.printPorts(t)
	r.printWire(t)
	r.printLeases(t)
	return t.Flush()
}

func (r *Report) printRouters(t io.Writer) {
	fmt.Fprintf(t, "ROUTER\tENDPOINT\tPID\tUP\tSTATE\n")
	for _, x := range r.Routers {
		fmt.Fprintf(t, "%s\thttp://%s/v1\t%d\t%s\t%s\n", x.ID, x.Addr, x.PID, since(x.Started), state(x.Error))
	}
}

func since(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return time.Since(t).Round(time.Second).String()
}

func state(problem string) string {
	if problem == "" {
		return "ok"
	}
	return problem
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func numberOrDash(n int, known bool) string {
	if !known {
		return "-"
	}
	return fmt.Sprint(n)
}

// humanBytes writes a number of bytes for people.
func humanBytes(v float64) string {
	for _, u := range []struct {
		limit float64
		name  string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if v >= u.limit {
			return fmt.Sprintf("%.1f %s", v/u.limit, u.name)
		}
	}
	return fmt.Sprintf("%.0f B", v)
}
