package sidecar

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/headrace/headrace/internal/registry"
)

// About is what an engine's connector told the node daemon of it.
type About struct {
	Engine         string `json:"engine"`
	Version        string `json:"version"`
	Model          string `json:"model"`
	BlockTokens    uint32 `json:"block_tokens"`
	Blocks         uint32 `json:"blocks"`
	ContextTokens  uint32 `json:"context_tokens"`
	TensorParallel uint32 `json:"tensor_parallel"`
	Fingerprint    string `json:"fingerprint"`
	Opaque         bool   `json:"opaque"`
	Layout         string `json:"layout"`
}

// Attachment is an engine as its node daemon sees it.
type Attachment struct {
	NodeID   string
	NodeData string // host:port that other daemons reach it at
	About    *About // nil while the engine has not told
	Leases   int
}

// Daemon finds the node daemon that serves a socket on this host, and an engine there.
type Daemon struct {
	Socket string
	Host   string
	Node   string // the daemon's id; "" finds it by socket and host
	View   func() *registry.View
	// Changed is closed at the registry's next change.
	Changed func() <-chan struct{}
	Client  *http.Client
}

// Incarnation tells one daemon at the socket from the next, and what is closed when that may have changed.
func (d *Daemon) Incarnation() (epoch uint64, changed <-chan struct{}) {
	changed = d.Changed() // before the view that it guards
	n, _ := d.find()
	return n.Epoch, changed
}

// Listens tells whether somebody serves the unix socket at path, without a connection that a daemon would have to log.
// The table is that of this network namespace: what it does not have may be served from another.
func Listens(path string) (served, known bool) {
	info, err := os.Stat(path)
	if err != nil || info.Mode()&os.ModeSocket == 0 {
		return false, true
	}
	table, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return false, false
	}
	return listening(string(table), path), false
}

// listening looks for a path among the sockets that accept connections.
func listening(table, path string) bool {
	const acceptCon = "00010000" // Flags, the fourth column
	for line := range strings.Lines(table) {
		line = strings.TrimRight(line, "\n")
		if f := strings.Fields(line); len(f) >= 8 && f[3] == acceptCon && strings.HasSuffix(line, " "+path) {
			return true
		}
	}
	return false
}

// Look asks the daemon for an engine.
func (d *Daemon) Look(ctx context.Context, engine string) (*Attachment, error) {
	n, ok := d.find()
	if !ok {
		return nil, fmt.Errorf("no node daemon with the socket %s on %s is in the registry; is `headrace node` running, with the same --etcd?", d.Socket, d.Host)
	}
	body, err := (&Asker{Base: "http://" + n.Admin, Client: d.Client}).get(ctx, "/status")
	if err != nil {
		return nil, fmt.Errorf("ask node daemon %s: %w", n.ID, err)
	}
	a, err := readAttachment(body, engine)
	if err != nil {
		return nil, fmt.Errorf("node daemon %s: %w", n.ID, err)
	}
	a.NodeID, a.NodeData = n.ID, n.DataAddr
	return a, nil
}

func (d *Daemon) find() (registry.Node, bool) {
	for _, n := range d.View().Nodes {
		if d.Node == "" && n.Socket == d.Socket && n.Host == d.Host || d.Node != "" && n.ID == d.Node {
			return n, n.Admin != ""
		}
	}
	return registry.Node{}, false
}

// errNotAttached is for an engine that the daemon does not know.
var errNotAttached = errors.New("the engine has not connected to it; does it run with Headrace's connector and this socket?")

func readAttachment(body []byte, engine string) (*Attachment, error) {
	var status struct {
		Engines []struct {
			EngineID string          `json:"engine_id"`
			Leases   int             `json:"leases"`
			About    json.RawMessage `json:"about"`
		} `json:"engines"`
	}
	if err := json.Unmarshal(body, &status); err != nil {
		return nil, fmt.Errorf("read /status: %w", err)
	}
	for _, e := range status.Engines {
		if e.EngineID != engine {
			continue
		}
		a := &Attachment{Leases: e.Leases}
		if len(e.About) > 0 && string(e.About) != "null" {
			a.About = &About{}
			if err := json.Unmarshal(e.About, a.About); err != nil {
				return nil, fmt.Errorf("read what the engine told of itself: %w", err)
			}
		}
		return a, nil
	}
	return nil, errNotAttached
}
