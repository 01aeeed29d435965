package router

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// Source is the fleet as the registry knows it.
type Source interface {
	// Workers returns all workers. The slice is not changed afterwards.
	Workers() []pairing.Worker
	// Changed returns a channel that is closed at the next change. It is taken before the Workers it guards.
	Changed() <-chan struct{}
}

// Config of a Router. Zero values are defaults; Source and ClusterKey are required.
type Config struct {
	Source     Source
	ClusterKey []byte // authenticates tickets towards the node daemons

	Policy pairing.Policy // least-loaded
	// Tokens tells, by model, which tokens prompts are; that of "" is for the models that are not named. Policies that look at prefixes go by the bytes of requests for models that
	// are not there, and by their own routing alone.
	Tokens map[string]Tokens
	// SessionHeader names the header with which a client says which of its requests belong together: they stay with the same
	// workers. X-Session-Id; "-" for none
	SessionHeader string
	SessionTTL    time.Duration // 10 min without a request
	// Decided is told each decision, with the numbers that it was made by, by the goroutine that serves the request: a place for a
	// span. It must not block. nil: nobody.
	Decided func(ctx context.Context, requestID string, dispatch int, d *pairing.Decision)

	// APIKeys, and those in APIKeysFile (one a line, # begins a comment), are what clients must show on /v1/.
	// None of both: everybody may.
	APIKeys     []string
	APIKeysFile string

	RequestTimeout time.Duration // 300 s, from the first byte to the last
	MaxAttempts    int           // 3: dispatches of one request
	// RecoveryTimeout is how long after a fault the request must be in other hands, else the client is told. 5 s
	RecoveryTimeout time.Duration

	MaxConcurrent int // 512: answers being made; a request for n takes n places, at most all
	MaxQueue      int // 512: requests waiting for their turn; more are refused with 429
	MaxConns      int // 8192: client connections

	MaxBodyBytes   int           // 32 MiB
	MaxHeaderBytes int           // 16 KiB
	ReadTimeout    time.Duration // 60 s for a whole request
	WriteTimeout   time.Duration // 20 s: a client that takes nothing for so long is cut off
	IdleTimeout    time.Duration // 120 s

	Upstream upstream.Config
	// ProbeTimeout is how long an engine that has been silent for Upstream.SilenceTimeout, and has no heartbeat, may take to
	// answer /health: a busy API server takes its time. 10 s
	ProbeTimeout time.Duration
	// NixlLease is for how long a vLLM with a NixlConnector keeps blocks for decode: its kv_lease_duration. 30 s
	NixlLease time.Duration
	// Recaller voids tickets of attempts that ended early; nil: their decode daemons are told.
	Recaller dialects.Recaller

	Logger   *slog.Logger
	Registry *prometheus.Registry // a new one
	Version  string
}

func (c *Config) setDefaults() error {
	if c.Source == nil {
		return errors.New("configure router: no source of workers")
	}
	if len(c.ClusterKey) == 0 {
		return errors.New("configure router: no cluster key")
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&c.RequestTimeout, 300 * time.Second}, {&c.RecoveryTimeout, 5 * time.Second}, {&c.ReadTimeout, time.Minute},
		{&c.WriteTimeout, 20 * time.Second}, {&c.IdleTimeout, 2 * time.Minute}, {&c.ProbeTimeout, 10 * time.Second},
		{&c.NixlLease, dialects.DefaultNixlLease}, {&c.SessionTTL, 10 * time.Minute},
	} {
		if *d.v < 0 {
			return errors.New("configure router: a timeout is negative")
		}
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	for _, d := range []struct {
		v   *int
		def int
	}{
		{&c.MaxAttempts, 3}, {&c.MaxConcurrent, 512}, {&c.MaxQueue, 512}, {&c.MaxConns, 8192},
		{&c.MaxBodyBytes, 32 << 20}, {&c.MaxHeaderBytes, 16 << 10},
	} {
		if *d.v < 0 {
			return errors.New("configure router: a limit is negative")
		}
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	if c.Policy == nil {
		c.Policy = &pairing.LeastLoaded{}
	}
	c.SessionHeader = cmp.Or(c.SessionHeader, "X-Session-Id")
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
	}
	return nil
}

// loadKeys joins the keys of list and file.
func loadKeys(list []string, path string) ([]string, error) {
	keys := append([]string(nil), list...)
	if path != "" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("read API keys: %w", err)
		}
		defer f.Close()
		for s := bufio.NewScanner(f); ; {
			if !s.Scan() {
				if err := s.Err(); err != nil {
					return nil, fmt.Errorf("read API keys from %s: %w", path, err)
				}
				break
			}
			if line := strings.TrimSpace(s.Text()); line != "" && line[0] != '#' {
				keys = append(keys, line)
			}
		}
		if len(keys) == 0 {
			return nil, fmt.Errorf("read API keys from %s: it has none, which would lock everybody out; leave the file out to let everybody in", path)
		}
	}
	for _, k := range keys {
		if strings.TrimSpace(k) == "" {
			return nil, errors.New("configure router: an API key is empty")
		}
	}
	return keys, nil
}
