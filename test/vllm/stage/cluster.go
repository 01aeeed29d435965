package stage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/status"
)

// UpConfig says how a cluster is started.
type UpConfig struct {
	Config
	Engine      string   // vllm, vllm-nixl, or vllm-plain, of which each serves whole requests
	Nodes       int      // node daemons, 2
	NixlDelayUS int      // pause of NIXL's progress thread; 0 as NIXL ships it
	ConfigFile  string   // headrace.yaml
	UpArgs      []string // more flags of `headrace up`
}

// Cluster is a running `headrace up` with one prefill and one decode engine, or one for both.
type Cluster struct {
	Dir    string
	engine string
	roles  []string
	proc   *Process
	url    string
	reg    *registry.Registry
	table  *registry.Table

	mu   sync.Mutex
	last map[string]seen // by role
}

// seen is an engine that was listed, and when its process began.
type seen struct {
	registry.Worker
	begun uint64
}

// Up starts a cluster and does not wait for it.
func (s *Stage) Up(c UpConfig) (*Cluster, error) {
	if c.Nodes == 0 {
		c.Nodes = 2
	}
	dir, err := os.MkdirTemp(s.Dir, "up")
	if err != nil {
		return nil, err
	}
	argv := []string{s.Env.Binary, "up", "--engine", c.Engine, "--model", s.Env.Model(c.Model), "--model-name", c.Model, "--python", s.Env.Python(),
		"--nodes", fmt.Sprint(c.Nodes), "--listen", "127.0.0.1:0", "--data-dir", dir, "--ready-file", filepath.Join(dir, "ready.json"), "--debug"}
	if c.ConfigFile != "" {
		argv = append(argv, "--config", c.ConfigFile)
	}
	env := append([]string{"XDG_RUNTIME_DIR=" + dir}, c.Env...)
	roles := []string{registry.RolePrefill, registry.RoleDecode}
	switch c.Engine {
	case "vllm":
		argv = append(argv, "--connector-path", filepath.Join(s.Env.Root, "connector"))
	case "vllm-plain":
		roles = []string{registry.RoleBoth}
	default:
		// NIXL talks over the loopback device alone.
		env = append(env, "PYTHONPATH="+filepath.Join(s.Env.Root, "nixl"), "UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo")
		if c.NixlDelayUS > 0 {
			env = append(env, fmt.Sprintf("HEADRACE_NIXL_DELAY_US=%d", c.NixlDelayUS))
		}
	}
	argv = append(append(argv, c.UpArgs...), "--")
	p, err := s.start("up-"+c.Engine, env, append(argv, c.args()...)...)
	if err != nil {
		return nil, err
	}
	return &Cluster{Dir: dir, engine: c.Engine, roles: roles, proc: p}, nil
}

// Ready waits until the router answers and both engines are in the registry.
func (c *Cluster) Ready(ctx context.Context) error {
	var fatal error
	var ready struct {
		URL  string `json:"url"`
		Etcd string `json:"etcd"`
	}
	err := Poll(ctx, startLimit, func() error {
		if fatal = c.proc.ended(); fatal != nil {
			return nil
		}
		data, err := os.ReadFile(filepath.Join(c.Dir, "ready.json"))
		if err != nil {
			return err
		}
		return json.Unmarshal(data, &ready)
	})
	if err := errors.Join(fatal, err); err != nil {
		return fmt.Errorf("wait for headrace up: %w", errors.Join(err, c.said()))
	}
	c.url = ready.URL + "/v1"
	// They live as long as the cluster does.
	if c.reg, err = registry.Open(context.Background(), registry.Config{Endpoints: []string{ready.Etcd}}); err != nil {
		return err
	}
	if c.table, err = c.reg.Watch(context.Background()); err != nil {
		return err
	}
	return c.Whole(ctx, startLimit)
}

// Whole waits until both engines and their daemons are listed, by the router too, which leaves neither alone, and answer.
func (c *Cluster) Whole(ctx context.Context, limit time.Duration) error {
	err := Poll(ctx, limit, func() error {
		if err := c.proc.ended(); err != nil {
			return err
		}
		for _, role := range c.roles {
			w, err := c.listed(role)
			if err != nil {
				return err
			}
			if _, err := get(ctx, "http://"+w.Addr+"/health"); err != nil {
				return err
			}
		}
		return c.routed(ctx)
	})
	if err != nil {
		return fmt.Errorf("wait for both engines: %w", errors.Join(err, c.said()))
	}
	return nil
}

// routed asks whether the router lists both engines, and would send either a request: its table is its own.
func (c *Cluster) routed(ctx context.Context) error {
	routers := c.table.Snapshot().Routers
	if len(routers) == 0 {
		return errors.New("no router is listed")
	}
	body, err := get(ctx, "http://"+routers[0].Admin+"/status")
	if err != nil {
		return err
	}
	var st struct {
		Workers []struct {
			ID       string `json:"id"`
			NodeData string `json:"node_data"`
			Cooling  string `json:"cooling"`
		} `json:"workers"`
	}
	if err := json.Unmarshal(body, &st); err != nil {
		return err
	}
	for _, role := range c.roles {
		w, err := c.listed(role)
		if err != nil {
			return err
		}
		found := false
		for _, known := range st.Workers {
			if known.ID != w.ID || known.NodeData != w.NodeData {
				continue
			}
			if found = true; known.Cooling != "" {
				return fmt.Errorf("the router leaves %s alone: %s", w.ID, known.Cooling)
			}
		}
		if !found {
			return fmt.Errorf("the router does not list %s: %s", w.ID, body)
		}
	}
	return nil
}

// Close lets go of the registry. The stage ends the processes.
func (c *Cluster) Close() {
	requests.CloseIdleConnections()
	pages.CloseIdleConnections()
	if c.reg != nil {
		_ = c.reg.Close() // etcd may be gone before
		c.reg = nil
	}
}

// URL is the router's API.
func (c *Cluster) URL() string { return c.url }

// Worker is the engine of a role: that which is listed, or, where none is, which was last and still runs. For want of processors an engine may be silent for so long that its entry is taken out for a
// while, which changes nothing about where it is.
func (c *Cluster) Worker(role string) (registry.Worker, error) {
	w, err := c.listed(role)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		if last := c.last[role]; w.ID == "" && last.begun != 0 && begun(last.PID) == last.begun {
			return last.Worker, nil
		}
		return w, err
	}
	if c.last == nil {
		c.last = map[string]seen{}
	}
	c.last[role] = seen{w, begun(w.PID)}
	return w, nil
}

// listed is the listed engine of a role.
func (c *Cluster) listed(role string) (registry.Worker, error) {
	for _, w := range c.table.Snapshot().Workers {
		if w.Role == role && state(w.PID) != 0 {
			if w.Dialect == "vllm" && w.NodeData == "" {
				return w, fmt.Errorf("engine %s has no daemon", w.ID)
			}
			return w, nil
		}
	}
	return registry.Worker{}, fmt.Errorf("no %s engine is listed", role)
}

// Engine is the engine of a role, for its metrics and for requests that pass the router by.
func (c *Cluster) Engine(role string) (*Engine, error) {
	w, err := c.Worker(role)
	return &Engine{Name: role, Addr: w.Addr}, err
}

// Engines are both.
func (c *Cluster) Engines() ([]*Engine, error) {
	p, err := c.Engine(registry.RolePrefill)
	if err != nil {
		return nil, err
	}
	d, err := c.Engine(registry.RoleDecode)
	return []*Engine{p, d}, err
}

// Idle says which blocks and requests the engines still hold, and which leases the daemons.
func (c *Cluster) Idle(ctx context.Context) error {
	engines, err := c.Engines()
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range engines {
		errs = append(errs, e.Idle(ctx))
	}
	return errors.Join(append(errs, c.Leases(ctx))...)
}

// Leases says which leases the daemons have.
func (c *Cluster) Leases(ctx context.Context) error {
	var errs []error
	for _, n := range c.table.Snapshot().Nodes {
		st, err := c.NodeStatus(ctx, n)
		if err == nil && len(st.Leases) > 0 {
			err = fmt.Errorf("daemon %s has %d leases: %s", n.ID, len(st.Leases), st.Leases[0])
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// NodeStatus is what is read of a daemon's /status.
type NodeStatus struct {
	Engines []struct {
		ID string `json:"engine_id"`
	} `json:"engines"`
	Leases []json.RawMessage `json:"leases"`
	Totals struct {
		Settled uint64 `json:"leases_settled"`
		Altered uint64 `json:"pieces_altered"`
	} `json:"totals"`
}

// NodeStatus asks a daemon.
func (c *Cluster) NodeStatus(ctx context.Context, n registry.Node) (*NodeStatus, error) {
	body, err := get(ctx, "http://"+n.Admin+"/status")
	if err != nil {
		return nil, err
	}
	st := &NodeStatus{}
	return st, json.Unmarshal(body, st)
}

// Node is the daemon of an engine.
func (c *Cluster) Node(role string) (registry.Node, error) {
	w, err := c.Worker(role)
	if err != nil {
		return registry.Node{}, err
	}
	n, ok := c.table.Snapshot().Node(w.NodeID)
	if !ok {
		return n, fmt.Errorf("daemon %s of %s is not listed", w.NodeID, w.ID)
	}
	return n, nil
}

// Moved is how many transfers decode has had: leases settled at its daemon, or what NixlConnector counts.
func (c *Cluster) Moved(ctx context.Context) (uint64, error) {
	if c.engine == "vllm-nixl" {
		e, err := c.Engine(registry.RoleDecode)
		if err != nil {
			return 0, err
		}
		m, err := e.Metrics(ctx)
		return uint64(m["vllm:nixl_xfer_time_seconds_count"]), err
	}
	n, err := c.Node(registry.RoleDecode)
	if err != nil {
		return 0, err
	}
	st, err := c.NodeStatus(ctx, n)
	if err != nil {
		return 0, err
	}
	return st.Totals.Settled, nil
}

// EnginePIDs are the processes of the engine of a role: its API server and the ones it has started, not its sidecar.
func (c *Cluster) EnginePIDs(role string) ([]int, error) {
	w, err := c.Worker(role)
	if err != nil {
		return nil, err
	}
	if w.EnginePID == 0 {
		return nil, fmt.Errorf("engine %s does not say its process", w.ID)
	}
	return append([]int{w.EnginePID}, Children(w.EnginePID)...), nil
}

// Decisions is what the router says of its latest requests.
func (c *Cluster) Decisions(ctx context.Context) (string, error) {
	routers := c.table.Snapshot().Routers
	if len(routers) == 0 {
		return "", errors.New("no router is listed")
	}
	body, err := get(ctx, "http://"+routers[0].Admin+"/debug/decisions")
	return string(body), err
}

// said is the end of every log of the cluster, for an error.
func (c *Cluster) said() error {
	logs, _ := filepath.Glob(filepath.Join(c.Dir, "logs", "*.log"))
	var out strings.Builder
	for _, path := range append(logs, c.proc.Log) {
		if filepath.Base(path) != "etcd.log" {
			fmt.Fprintf(&out, "---- %s\n%s\n", filepath.Base(path), Tail(path, 3000))
		}
	}
	return errors.New(out.String())
}

// Logged is how many lines of all logs hold a text.
func (c *Cluster) Logged(text string) (int, error) {
	logs, err := filepath.Glob(filepath.Join(c.Dir, "logs", "*.log"))
	if err != nil {
		return 0, err
	}
	n := 0
	for _, path := range append(logs, c.proc.Log) {
		data, err := os.ReadFile(path)
		if err != nil {
			return 0, err
		}
		n += strings.Count(string(data), text)
	}
	return n, nil
}

// Said is the logs' ends.
func (c *Cluster) Said() string { return c.said().Error() }

// Planner is what the cluster's planner says.
func (c *Cluster) Planner(ctx context.Context) (*status.PlannerStatus, error) {
	planners := c.table.Snapshot().Planners
	if len(planners) == 0 {
		return nil, errors.New("no planner is listed")
	}
	body, err := get(ctx, "http://"+planners[0].Admin+"/status")
	if err != nil {
		return nil, err
	}
	s := &status.PlannerStatus{}
	return s, json.Unmarshal(body, s)
}
