// Package connector starts and stops engines for a planner. It must not know why: what is to be is decided elsewhere, and what was begun is
// remembered there.
package connector

import (
	"context"
	"fmt"
	"slices"
)

// Roles of engines.
const (
	Prefill = "prefill"
	Decode  = "decode"
	Whole   = "whole" // both, in one
)

// Engine is one that a connector has started, or is to start.
type Engine struct {
	Name string   `json:"name"` // what the connector knows it by
	ID   string   `json:"id"`   // what the registry knows it by, once there is one
	Role string   `json:"role"`
	GPUs []string `json:"gpus,omitempty"`
	// Stopping: it was told to stop and has not ended yet.
	Stopping bool   `json:"stopping,omitempty"`
	Says     string `json:"says,omitempty"` // the last it wrote, for people who wait for it
}

// Cluster is what a connector can see.
type Cluster struct {
	Engines []Engine
	Slots   []string       // GPUs that engines may have, by name; none: they are not counted here
	Each    map[string]int // of those, that an engine of a role takes
	Host    string         // the machine that has the slots
	// FreeRAM is what the machine has to spare, EngineRAM what an engine may come to take of it, in bytes. 0: not known, and not checked.
	FreeRAM, EngineRAM int64
}

// Connector starts and stops engines. All of it may be asked for again: starting what runs, or stopping what has ended, is no error, so that who
// asks may have died in between. Methods are called by one goroutine.
type Connector interface {
	// Name says what kind it is.
	Name() string
	// Cluster lists the engines that there are, also those that others started.
	Cluster(ctx context.Context) (*Cluster, error)
	// Start has an engine started by its name, role and GPUs, and does not wait until it serves.
	Start(ctx context.Context, e Engine) error
	// Stop has an engine ended that has nothing to do any more, and does not wait for it.
	Stop(ctx context.Context, e Engine) error
}

// Allocate finds n slots that nobody holds, the first that there are.
func Allocate(slots []string, held [][]string, n int) ([]string, error) {
	var free []string
	for _, s := range slots {
		if !slices.ContainsFunc(held, func(h []string) bool { return slices.Contains(h, s) }) {
			free = append(free, s)
		}
	}
	if len(free) < n {
		return nil, fmt.Errorf("%d GPUs are needed and %d of %d are free", n, len(free), len(slots))
	}
	return free[:n:n], nil
}
