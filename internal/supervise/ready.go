package supervise

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

// healthEvery is how often the router is asked whether it is ready; it has no other way to tell.
const healthEvery = 20 * time.Millisecond

// doingEvery is how often those that wait are shown what the engines do.
const doingEvery = 10 * time.Second

// awaitReady returns when a request can be served: every part is listed by the process that runs now, every worker
// has its node daemon, and the router says that it is healthy, has a model to offer and sees the workers as we do: what
// it learnt a moment before their daemons would be served whole.
func (u *upper) awaitReady(ctx context.Context) error {
	patience := startTimeout
	if u.o.Engine != nil {
		patience = u.o.Engine.Start
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not everything was up within %s", patience))
	defer cancel()
	said := ""
	ticker := time.NewTicker(healthEvery)
	defer ticker.Stop()
	slow := time.NewTicker(doingEvery)
	defer slow.Stop()
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for {
		changed := u.table.Changed()
		missing := u.missing(u.table.Snapshot())
		if missing != said && missing != "" {
			u.progress("waiting for %s", missing)
			said = missing
		}
		if missing == "" && u.routerServes(ctx, client) && u.routerSees(ctx, client, u.table.Snapshot()) {
			return nil
		}
		tick := ticker.C
		if missing != "" {
			tick = nil // the registry will tell
		}
		select {
		case <-changed:
		case <-tick:
		case <-slow.C:
			u.doing()
		case e := <-u.exits:
			if !e.Signalled {
				return fmt.Errorf("start %s: %s", e.Name, u.explain(e))
			}
		case err := <-u.etcdErr:
			return fmt.Errorf("run etcd: %w", err)
		case <-ctx.Done():
			if cause := context.Cause(ctx); cause != context.Canceled {
				return fmt.Errorf("start: %w; still missing: %s; see %s", cause, said, u.dir.Logs())
			}
			return ErrInterrupted
		}
	}
}

// explain takes the child's own last words, without the name that it begins errors with.
func (u *upper) explain(e Exit) string {
	reason := e.Reason()
	if rest, ok := strings.CutPrefix(reason, "headrace "); ok {
		if _, after, ok := strings.Cut(rest, ": "); ok {
			reason = after
		}
	}
	return reason
}

// missing names the parts that are not ready, "" when all are.
func (u *upper) missing(view *registry.View) string {
	pids := u.group.PIDs()
	var names []string
	for _, p := range u.list() {
		var ok bool
		switch p.kind {
		case "node":
			n, there := view.Node(p.id)
			ok = there && n.PID == pids[p.spec.Name]
		case "worker":
			w, there := view.Worker(p.id)
			ok = there && w.PID == pids[p.spec.Name] && (w.NodeData != "" || !u.attaches())
		case "router":
			r, there := view.Router(p.id)
			ok = there && r.PID == pids[p.spec.Name]
		}
		if !ok {
			names = append(names, p.spec.Name)
		}
	}
	return strings.Join(names, ", ")
}

// doing shows what engines of another kind, whose start takes its time, say meanwhile.
func (u *upper) doing() {
	if u.o.Engine == nil {
		return
	}
	for _, p := range u.list() {
		if line := u.group.LastLine(p.spec.Name); p.kind == "worker" && line != "" {
			u.progress("  %s: %.150s", p.spec.Name, line)
		}
	}
}

// attaches tells whether workers are not ready without a node daemon.
func (u *upper) attaches() bool { return u.o.Engine == nil || u.o.Engine.Attaches }

func (u *upper) routerServes(ctx context.Context, client *http.Client) bool {
	url := "http://" + dialable(u.addr)
	// With API keys the list of models is closed to us; the door being shut means that there is a door.
	return status(ctx, client, url+"/health") == http.StatusOK && slices.Contains([]int{http.StatusOK, http.StatusUnauthorized}, status(ctx, client, url+"/v1/models"))
}

// routerSees asks our routers which workers they know together with a node daemon.
func (u *upper) routerSees(ctx context.Context, client *http.Client, view *registry.View) bool {
	for _, p := range u.list() {
		if p.kind != "router" {
			continue
		}
		r, _ := view.Router(p.id)
		var seen struct {
			Workers []struct {
				ID       string `json:"id"`
				NodeData string `json:"node_data"`
			} `json:"workers"`
		}
		if get(ctx, client, "http://"+r.Admin+"/status", &seen) != http.StatusOK {
			return false
		}
		paired := map[string]bool{}
		for _, w := range seen.Workers {
			paired[w.ID] = w.NodeData != "" || !u.attaches()
		}
		for _, w := range u.list() {
			if w.kind == "worker" && !paired[w.id] {
				return false
			}
		}
	}
	return true
}

// status asks for url; 0 when there is no answer.
func status(ctx context.Context, client *http.Client, url string) int {
	return get(ctx, client, url, nil)
}

// get asks for url and reads the JSON of a good answer into v, unless that is nil. It gives the status, 0 for no answer.
func get(ctx context.Context, client *http.Client, url string, v any) int {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	if v != nil && resp.StatusCode == http.StatusOK && json.NewDecoder(resp.Body).Decode(v) != nil {
		return 0
	}
	return resp.StatusCode
}
