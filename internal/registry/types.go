package registry

import (
	"encoding/json"
	"fmt"
	"sort"
	"strings"
	"time"
)

// Kind is the sort of a part; it names the folder that the part's key lies in.
type Kind string

// The kinds of parts that announce themselves.
const (
	KindNode    Kind = "nodes"
	KindWorker  Kind = "workers"
	KindRouter  Kind = "routers"
	KindPlanner Kind = "planners"
	// KindDrain is a word about a worker, see Drain.
	KindDrain Kind = "drains"
)

// Roles of a worker.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
	RoleBoth    = "both"
)

const (
	// prefix holds the version of the values: a change that old readers misread gets a new one.
	prefix = "/headrace/v1/"
	// idBytesMax and valueBytesMax bound what one part may put into every router's memory.
	idBytesMax    = 128
	valueBytesMax = 64 << 10
)

// Node is a node daemon, one a host.
type Node struct {
	ID         string    `json:"id"`
	Epoch      uint64    `json:"epoch"`
	PID        int       `json:"pid"`
	Host       string    `json:"host"`
	DataAddr   string    `json:"data_addr"`
	Socket     string    `json:"socket"`
	Admin      string    `json:"admin"`
	Transports []string  `json:"transports"`
	Started    time.Time `json:"started"`
}

// Worker is an engine.
type Worker struct {
	ID   string `json:"id"`
	Role string `json:"role"`
	// Model is the name clients ask for.
	Model string `json:"model"`
	// Addr is the host:port of the worker's HTTP server.
	Addr   string `json:"addr"`
	NodeID string `json:"node_id"`
	// NodeData is the host:port of its daemon's data plane, "" while it has no daemon.
	NodeData string `json:"node_data"`
	// Dialect is how a router talks to it, "native" for our own engine.
	Dialect string `json:"dialect"`
	// Fingerprint is the model's, in hex: only equals may exchange KV.
	Fingerprint   string `json:"fingerprint"`
	BlockTokens   uint32 `json:"block_tokens"`
	Blocks        uint32 `json:"blocks"`
	ContextTokens uint32 `json:"context_tokens"`
	// TensorParallel is how many ranks share the KV heads; 0 is 1.
	TensorParallel uint32 `json:"tensor_parallel,omitempty"`
	// Engine is its name and version where it is not our own.
	Engine string `json:"engine,omitempty"`
	// Opaque says that KV blocks are bytes that only equal blocks can take.
	Opaque bool `json:"opaque,omitempty"`
	// Layout says in words how its KV cache lies in memory.
	Layout string `json:"layout,omitempty"`
	// KVAddr is the host:port at which the engine's own KV connector is found by its peers: the bootstrap server of SGLang or
	// Mooncake, NIXL's side channel, P2P-NCCL's socket. KVEngine is what its peers call it.
	KVAddr   string `json:"kv_addr,omitempty"`
	KVEngine string `json:"kv_engine,omitempty"`
	// PipelineParallel is how many stages the layers are shared out over; 0 is 1.
	PipelineParallel uint32 `json:"pipeline_parallel,omitempty"`
	// LoRAs are the adapters it serves beside its model, by the names that clients ask for.
	LoRAs []string `json:"loras,omitempty"`
	// Weight is the part of the traffic that it is to get of what another worker would, 0 to 1; 0: it drains. None is 1.
	Weight *float64 `json:"weight,omitempty"`
	// Events and EventsReplay are host:port of its KV events' publisher (ZMQ PUB) and of their replay (ROUTER).
	Events       string `json:"events,omitempty"`
	EventsReplay string `json:"events_replay,omitempty"`
	EnginePID    int    `json:"engine_pid,omitempty"`
	// Namespace tells deployments apart that share a registry: planners count their own alone.
	Namespace string    `json:"namespace,omitempty"`
	PID       int       `json:"pid"`
	Host      string    `json:"host"`
	Started   time.Time `json:"started"`
}

// Router is an OpenAI front.
type Router struct {
	ID      string    `json:"id"`
	Addr    string    `json:"addr"`
	Admin   string    `json:"admin"`
	PID     int       `json:"pid"`
	Host    string    `json:"host"`
	Started time.Time `json:"started"`
}

// Planner decides how many workers there are of one model in one namespace. Of several with the same two one leads.
type Planner struct {
	ID        string    `json:"id"`
	Namespace string    `json:"namespace,omitempty"`
	Model     string    `json:"model"`
	Admin     string    `json:"admin"`
	PID       int       `json:"pid"`
	Host      string    `json:"host"`
	Started   time.Time `json:"started"`
}

// View is what the registry held at one revision. It is immutable, each slice sorted by id.
type View struct {
	Revision int64
	Nodes    []Node
	Workers  []Worker
	Routers  []Router
	Planners []Planner
}

// Node finds a node daemon by its id.
func (v *View) Node(id string) (Node, bool) {
	i := sort.Search(len(v.Nodes), func(i int) bool { return v.Nodes[i].ID >= id })
	if i < len(v.Nodes) && v.Nodes[i].ID == id {
		return v.Nodes[i], true
	}
	return Node{}, false
}

// Worker finds a worker by its id.
func (v *View) Worker(id string) (Worker, bool) {
	i := sort.Search(len(v.Workers), func(i int) bool { return v.Workers[i].ID >= id })
	if i < len(v.Workers) && v.Workers[i].ID == id {
		return v.Workers[i], true
	}
	return Worker{}, false
}

// Router finds a router by its id.
func (v *View) Router(id string) (Router, bool) {
	i := sort.Search(len(v.Routers), func(i int) bool { return v.Routers[i].ID >= id })
	if i < len(v.Routers) && v.Routers[i].ID == id {
		return v.Routers[i], true
	}
	return Router{}, false
}

func checkID(kind Kind, id string) error {
	switch kind {
	case KindNode, KindWorker, KindRouter, KindPlanner, KindDrain:
	default:
		return fmt.Errorf("announce %q: unknown kind, want %s, %s, %s or %s", kind, KindNode, KindWorker, KindRouter, KindPlanner)
	}
	if id == "" || len(id) > idBytesMax || strings.ContainsAny(id, "/\x00\n") {
		return fmt.Errorf("announce %s %q: an id has 1 to %d bytes and no slash", kind, id, idBytesMax)
	}
	return nil
}

func keyOf(kind Kind, id string) string { return prefix + string(kind) + "/" + id }

// splitKey undoes keyOf.
func splitKey(key string) (Kind, string, error) {
	rest, ok := strings.CutPrefix(key, prefix)
	if !ok {
		return "", "", fmt.Errorf("read key %q: not below %s", key, prefix)
	}
	kind, id, ok := strings.Cut(rest, "/")
	if !ok {
		return "", "", fmt.Errorf("read key %q: no id", key)
	}
	return Kind(kind), id, checkID(Kind(kind), id)
}

// decodeEntry reads one key and its value. What it refuses is left out of the view, never a reason to drop the view.
func decodeEntry(key string, value []byte) (any, error) {
	kind, id, err := splitKey(key)
	if err != nil {
		return nil, err
	}
	if len(value) > valueBytesMax {
		return nil, fmt.Errorf("read %s: %d bytes, at most %d", key, len(value), valueBytesMax)
	}
	switch kind {
	case KindNode:
		return decodeAs(key, id, value, func(n *Node) string { return n.ID })
	case KindWorker:
		return decodeAs(key, id, value, func(w *Worker) string { return w.ID })
	case KindDrain:
		return decodeAs(key, id, value, func(d *Drain) string { return d.ID })
	case KindPlanner:
		return decodeAs(key, id, value, func(p *Planner) string { return p.ID })
	default:
		return decodeAs(key, id, value, func(r *Router) string { return r.ID })
	}
}

func decodeAs[T any](key, id string, value []byte, idOf func(*T) string) (any, error) {
	var v T
	if err := json.Unmarshal(value, &v); err != nil {
		return nil, fmt.Errorf("read %s: %w", key, err)
	}
	if got := idOf(&v); got != id {
		return nil, fmt.Errorf("read %s: the value names itself %q", key, got)
	}
	return v, nil
}

// newView sorts entries, keyed by their full keys, into a view.
func newView(revision int64, entries map[string]any) *View {
	keys := make([]string, 0, len(entries))
	for k := range entries {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	v := &View{Revision: revision}
	for _, k := range keys {
		switch e := entries[k].(type) {
		case Node:
			v.Nodes = append(v.Nodes, e)
		case Worker:
			if d, ok := entries[keyOf(KindDrain, e.ID)].(Drain); ok && d.means(&e) {
				e.Weight = new(float64)
			}
			v.Workers = append(v.Workers, e)
		case Router:
			v.Routers = append(v.Routers, e)
		case Planner:
			v.Planners = append(v.Planners, e)
		}
	}
	return v
}
