package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/tracing"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// bodyBytesMax is the largest body where nothing else is said.
const bodyBytesMax = 32 << 20

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
	// Warm, when set, is asked by New for another router's snapshot of its prefix index, of "tokens" and of "bytes": see
	// FetchPrefixes. What cannot be had is learned anew.
	Warm func(ctx context.Context, of string) (io.ReadCloser, error)
	// SessionHeader names the header with which a client says which of its requests belong together: they stay with the same
	// workers. X-Session-Id; "-" for none
	SessionHeader string
	SessionTTL    time.Duration // 10 min without a request
	// Decided is told each decision, with the numbers that it was made by, by the goroutine that serves the request: a place for a
	// span. It must not block. nil: nobody.
	Decided func(ctx context.Context, requestID string, dispatch int, d *pairing.Decision)

	// APIKeys, and those in APIKeysFile (lines of KeyLine, or keys as they are; # begins a comment), are what clients must show
	// on /v1/. None of both: everybody may. The file is read again when it changes.
	APIKeys     []string
	APIKeysFile string

	// AdminHosts are names, beside addresses and localhost, under which ServeAdmin answers. AdminOpen: it answers other hosts that do not
	// show the cluster key, too.
	AdminHosts []string
	AdminOpen  bool

	// TLSCert and TLSKey are PEM files of the certificate, with its chain, and the key that clients are shown: Serve then speaks TLS. They are read
	// again when they change. Both or none.
	TLSCert, TLSKey string

	RequestTimeout time.Duration // 300 s, from the first byte to the last
	MaxAttempts    int           // 3: dispatches of one request
	Breaking       Breaking
	// HedgeAfter is how long a request's first attempt may answer nothing before a second one begins beside it, elsewhere: whose answer comes first
	// serves it. It counts as a retry. 0: never
	HedgeAfter time.Duration
	// RecoveryTimeout is how long after a fault the request must be in other hands, else the client is told. 5 s
	RecoveryTimeout time.Duration

	MaxConcurrent int // 512: answers being made; a request for n takes n places, at most all
	MaxQueue      int // 512: requests waiting for their turn; more are refused with 429
	// MaxQueueBytes bounds the bodies of those that wait. 256 MiB, or MaxBodyBytes if that is more
	MaxQueueBytes int64
	// MaxHeldBytes bounds the memory of the bodies of all requests, those being read among them; what is beyond is refused with 429
	// before it is read. Bodies of 16 KiB and less are not counted. 1 GiB, or MaxBodyBytes if that is more
	MaxHeldBytes int64
	// QueueTimeout is how long a request may wait for its turn; 0: as long as it may take at all.
	QueueTimeout time.Duration
	// PriorityAging is how much longer a request must have waited than one whose priority number is lower by one, to be served
	// before it. 10 s; below 0: it never is
	PriorityAging time.Duration
	// PriorityHeader and TenantHeader name headers with a request's priority (in place of the body's) and with whom it shares the
	// places (in place of its API key). Clients may write into them what they like, unless somebody in between sees to it; "" for none.
	PriorityHeader, TenantHeader string
	// TimeoutHeader names the header in which a client may ask for less than RequestTimeout. X-Request-Timeout; "-" for none
	TimeoutHeader string
	// TenantWeights are tenants' parts of the places while requests wait, in relation to each other; 1 for who is not there. A tenant
	// is called by TenantHeader, or by its key: sha256: and the first 8 hex digits of the key's hash.
	TenantWeights map[string]float64
	MaxConns      int // 8192: client connections

	MaxBodyBytes   int           // 32 MiB
	MaxHeaderBytes int           // 16 KiB
	HeaderTimeout  time.Duration // 10 s for a request's header, from its first byte
	ReadTimeout    time.Duration // 60 s for a whole request
	WriteTimeout   time.Duration // 20 s: a client that takes nothing for so long is cut off
	IdleTimeout    time.Duration // 120 s

	Upstream upstream.Config
	// ProbeTimeout is how long an engine that has been silent for Upstream.SilenceTimeout, and has no heartbeat, may take to
	// answer /health: a busy API server takes its time. 10 s
	ProbeTimeout time.Duration
	// NixlLease is for how long a vLLM with a NixlConnector keeps blocks for decode: its kv_lease_duration. 30 s
	NixlLease time.Duration
	// Migration has, by dialect, what is remembered of streams, so that another engine can go on with them when theirs dies; nil:
	// dialects.DefaultMigration.
	Migration map[string]dialects.Memory
	// Moves is how many streams of our own workers leave one that drains at the same time, with their KV cache, and how many go to one. 4; -1: they end
	// where they are.
	Moves int
	// Recaller voids tickets of attempts that ended early; nil: their decode daemons are told.
	Recaller dialects.Recaller

	// AccessLog takes a line a request, by Write calls of whole lines from one goroutine; nil: nobody does. Logfmt, or with
	// AccessJSON an object a line.
	AccessLog  io.Writer
	AccessJSON bool

	// Tracer exports the spans of requests; nil: nobody does, and a client's traceparent is passed on as it is. The caller closes it
	// behind the router's Shutdown.
	Tracer *tracing.Tracer

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
	return c.fill()
}

// Validate says what cannot be of a configuration, before there is a router. Source and ClusterKey may be missing.
func (c Config) Validate() error {
	if err := c.fill(); err != nil {
		return err
	}
	_, err := loadKeys(c.APIKeys, c.APIKeysFile, slog.New(slog.DiscardHandler))
	if err == nil && c.TLSCert != "" {
		_, err = loadPair(c.TLSCert, c.TLSKey)
	}
	return err
}

// fill sets what is not set, and says what cannot be.
func (c *Config) fill() error {
	for _, d := range []struct {
		name string
		v    *time.Duration
		def  time.Duration
	}{
		{"request-timeout", &c.RequestTimeout, 300 * time.Second}, {"recovery timeout", &c.RecoveryTimeout, 5 * time.Second}, {"read timeout", &c.ReadTimeout, time.Minute},
		{"header timeout", &c.HeaderTimeout, 10 * time.Second}, {"write timeout", &c.WriteTimeout, 20 * time.Second}, {"idle timeout", &c.IdleTimeout, 2 * time.Minute},
		{"probe timeout", &c.ProbeTimeout, 10 * time.Second}, {"nixl-lease", &c.NixlLease, dialects.DefaultNixlLease}, {"session-ttl", &c.SessionTTL, 10 * time.Minute},
		{"hedge-after", &c.HedgeAfter, 0},
	} {
		if *d.v < 0 {
			return fmt.Errorf("configure router: %s %s is negative", d.name, *d.v)
		}
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	for _, d := range []struct {
		name string
		v    *int
		def  int
	}{
		{"attempts", &c.MaxAttempts, 3}, {"max-concurrent", &c.MaxConcurrent, 512}, {"max-queue", &c.MaxQueue, 512}, {"connections", &c.MaxConns, 8192},
		{"max-body", &c.MaxBodyBytes, bodyBytesMax}, {"header bytes", &c.MaxHeaderBytes, 16 << 10},
	} {
		if *d.v < 0 {
			return fmt.Errorf("configure router: %s %d is negative", d.name, *d.v)
		}
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	if c.Moves < -1 {
		return errMoves
	}
	if c.Policy == nil {
		c.Policy = &pairing.LeastLoaded{}
	}
	if c.Migration == nil {
		c.Migration = dialects.DefaultMigration()
	}
	if err := errors.Join(c.checkAdmission(), c.checkHeld(), c.checkTLS()); err != nil {
		return err
	}
	if err := c.Breaking.check(); err != nil {
		return err
	}
	c.TimeoutHeader = cmp.Or(c.TimeoutHeader, "X-Request-Timeout")
	c.SessionHeader = cmp.Or(c.SessionHeader, "X-Session-Id")
	for _, h := range []struct{ name, header string }{{"session-header", c.SessionHeader}, {"timeout-header", c.TimeoutHeader}, {"priority-header", c.PriorityHeader}, {"tenant-header", c.TenantHeader}} {
		if h.header != "" && !isToken([]byte(h.header)) { // "-", which is for none, is one
			return fmt.Errorf("configure router: %s %q: no request can have such a header", h.name, h.header)
		}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
	}
	return nil
}
