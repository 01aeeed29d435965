package connector

import (
	"context"
	"errors"
)

// ErrDry is the answer to who would act through a Dry.
var ErrDry = errors.New("this connector changes nothing")

// Dry sees the engines that another way of listing finds, and starts and stops none.
type Dry struct {
	List func(ctx context.Context) (*Cluster, error)
}

// Name is dry-run.
func (d *Dry) Name() string { return "dry-run" }

// Cluster lists the engines.
func (d *Dry) Cluster(ctx context.Context) (*Cluster, error) { return d.List(ctx) }

// Start refuses.
func (d *Dry) Start(context.Context, Engine) error { return ErrDry }

// Stop refuses.
func (d *Dry) Stop(context.Context, Engine) error { return ErrDry }

var _ Connector = (*Dry)(nil)
