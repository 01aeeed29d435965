package sidecar

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

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
	Client *http.Client
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
