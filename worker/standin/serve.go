package standin

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"

	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/kvevents"
)

const inFlightMax = 1 << 16

// Server is an engine behind HTTP.
type Server struct {
	// BodyMax is the largest body of a request, bytes (33 MiB).
	BodyMax int64
	Config  Config
	// Listener is where it serves. Events and EventsReplay are where KV events are published and replayed (nil: nowhere).
	Listener, Events, EventsReplay net.Listener
}

// Fingerprint is the one that workers of a model announce: what a prompt's KV depends on, here.
func (c *Config) Fingerprint() [32]byte {
	return sha256.Sum256(fmt.Appendf(nil, "stand-in %s %d %d", c.Model, c.Seed, c.Table.BytesPerToken))
}

// Run serves until ctx ends or the listener breaks. All listeners are closed when it returns.
func (s *Server) Run(ctx context.Context) (err error) {
	cfg := s.Config
	if s.Events != nil {
		p := kvevents.New(s.Events, s.EventsReplay, cfg.Table.BlockTokens, cfg.Logger)
		defer func() { err = errors.Join(err, p.Close()) }()
		cfg.Events = p
	}
	e, err := New(cfg)
	if err != nil {
		return errors.Join(err, s.Listener.Close())
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	t := text{cfg.Table.BytesPerToken}
	if s.BodyMax == 0 {
		s.BodyMax = 33 << 20
	}
	h, err := api.New(api.Config{Engine: e, Tokenizer: t, Chat: t, Logger: cfg.Logger, BodyBytesMax: s.BodyMax, InFlightMax: inFlightMax})
	if err != nil {
		return errors.Join(err, s.Listener.Close())
	}
	return h.Run(ctx, s.Listener, nil)
}
