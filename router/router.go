package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttpadaptor"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/admission"
	"github.com/headrace/headrace/router/breaker"
	"github.com/headrace/headrace/router/collect"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/hangup"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/socket"
	"github.com/headrace/headrace/router/upstream"
)

const (
	// stopTimeout bounds what Shutdown still waits for behind its context.
	stopTimeout   = 2 * time.Second
	keepAlive     = 30 * time.Second
	acceptWaitMin = 5 * time.Millisecond
	acceptWaitMax = time.Second
)

// Router is the front. Its methods are safe for concurrent use.
type Router struct {
	cfg            Config
	log            *slog.Logger
	keys           *keys
	certs          *certs // nil for no TLS
	metrics        *metrics
	fleet          *fleet
	client         *upstream.Client
	dialects       map[string]dialects.Dialect
	probes         *dialects.Prober
	errands        *dialects.Errands
	bootstraps     *dialects.Bootstraps
	recaller       *recaller // nil when the configuration brought one
	admission      *admission.Queue
	refusals       refusals
	bodies         *bodies
	adminRefused   *prometheus.CounterVec // by why
	budget         *breaker.Budget        // of retries
	breakerMetrics *breakerMetrics
	ends           *hangup.Watcher // of clients; nil where there is none
	decisions      *decisionRing
	hedges         hedges
	moves          *moves
	recent         recent
	access         *accessLog // nil for none
	spans          *spans     // nil for none
	sessions       *sessions
	prompts        *prompts // nil when the policy does not look at prefixes
	started        time.Time

	servings       sync.Pool // of *serving
	buffers        sync.Pool // of *[]byte, for bodies of requests
	metricsHandler fasthttp.RequestHandler
	base           context.Context // of all requests
	stopAll        context.CancelCauseFunc

	mu        sync.Mutex // guards what follows
	listeners []net.Listener
	conns     map[*clientConn]struct{}
	admins    []*http.Server
	active    int // requests of generating endpoints
	stopping  bool
	idle      chan struct{} // closed when stopping and nothing is active
	served    sync.WaitGroup
}

// New makes a Router. Shutdown must be called in the end.
func New(cfg Config) (*Router, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	keys, err := newKeys(cfg.APIKeys, cfg.APIKeysFile, cfg.Logger)
	if err != nil {
		return nil, err
	}
	r := &Router{
		cfg: cfg, log: cfg.Logger, keys: keys, metrics: newMetrics(cfg.Registry), client: upstream.New(cfg.Upstream),
		admission: admission.New(admission.Config{Places: cfg.MaxConcurrent, Waiting: cfg.MaxQueue, WaitingBytes: cfg.MaxQueueBytes,
			Aging: cfg.PriorityAging, Patience: cfg.QueueTimeout, Weights: cfg.TenantWeights}),
		decisions: &decisionRing{}, started: time.Now(),
		conns: map[*clientConn]struct{}{}, idle: make(chan struct{}), sessions: newSessions(cfg.SessionTTL),
	}
	if r.certs, err = newCerts(&cfg); err != nil {
		return nil, err
	}
	r.refusals = newRefusals(cfg.Registry, r.admission)
	r.adminRefused = prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "headrace", Subsystem: "router", Name: "admin_refusals_total",
		Help: "Requests that the admin address refused, by why: host (a name that is not allowed), key (from another host, without the cluster key)."}, []string{"why"})
	cfg.Registry.MustRegister(r.adminRefused)
	r.hedges = newHedges(cfg.Registry)
	r.moves = newMoves(limitOfMoves(cfg.Moves), cfg.Registry)
	r.bodies = newBodies(cfg.MaxHeldBytes, cfg.Registry, r.refusals[whyMemory])
	collecting := collect.Config{Logger: cfg.Logger}
	var taken func([]*member)
	if pairing.WantsPrefixes(cfg.Policy) {
		if r.prompts, err = newPrompts(&cfg); err != nil {
			return nil, err
		}
		r.prompts.register(cfg.Registry)
		if cfg.Warm != nil { // before anything is heard of workers
			if err := r.prompts.warm(cfg.Warm); err != nil {
				cfg.Logger.Info("begin without another router's prefix index", "err", err)
			}
		}
		collecting.Sink = r.prompts.index
		taken = r.prompts.keep
	}
	r.cfg.APIKeys = nil
	r.probes = dialects.NewProber(r.client, cmp.Or(cfg.Upstream.SilenceTimeout, upstream.SilenceTimeout), cfg.ProbeTimeout)
	r.errands = dialects.NewErrands(r.client, func(result string) { r.metrics.aborts.WithLabelValues(result).Inc() })
	r.bootstraps = dialects.NewBootstraps(r.client)
	if cfg.Recaller == nil {
		if r.recaller, err = newRecaller(cfg.ClusterKey, dataAddr(cfg.Source), cfg.Logger, r.metrics); err != nil {
			return nil, fmt.Errorf("configure router: %w", err)
		}
		cfg.Recaller = r.recaller
	}
	r.dialects = map[string]dialects.Dialect{}
	for _, d := range []dialects.Dialect{
		&dialects.Native{Client: r.client, Key: cfg.ClusterKey},
		&dialects.VLLM{Client: r.client, Key: cfg.ClusterKey, Probes: r.probes, Recaller: cfg.Recaller},
		&dialects.Nixl{Client: r.client, Probes: r.probes, Lease: cfg.NixlLease},
		&dialects.NixlPush{Client: r.client, Probes: r.probes},
		&dialects.Mooncake{Client: r.client, Probes: r.probes, Bootstraps: r.bootstraps},
		&dialects.NCCL{Client: r.client, Probes: r.probes, Errands: r.errands},
		&dialects.SGLang{Client: r.client, Probes: r.probes, Errands: r.errands},
		&dialects.Plain{Client: r.client, Probes: r.probes},
	} {
		r.dialects[d.Name()] = d
	}
	if r.ends, err = hangup.New(); err != nil {
		cfg.Logger.Debug("clients are watched by reading", "err", err)
		r.ends = nil
	}
	r.spans = newSpans(cfg.Tracer, cfg.Source, r.metrics.untraced.Inc)
	r.access = newAccessLog(cfg.AccessLog, cfg.AccessJSON, r.metrics.unlogged)
	r.base, r.stopAll = context.WithCancelCause(context.Background())
	r.fleet = newFleet(cfg.Source, cfg.Breaking, r.client, func(dialect string) bool { return r.dialects[dialect] != nil }, collecting, taken)
	cfg.Registry.MustRegister(r.fleet.engines)
	r.breakerMetrics, r.budget = newBreakerMetrics(cfg.Registry, r.fleet), breaker.NewBudget(cfg.Breaking.RetryShare, cfg.Breaking.RetryRate)
	if cfg.APIKeysFile != "" {
		r.served.Go(func() { follow(r.base.Done(), r.keys.look) })
	}
	if r.certs != nil {
		r.served.Go(func() { follow(r.base.Done(), r.certs.look) })
	}
	r.metricsHandler = fasthttpadaptor.NewFastHTTPHandler(promhttp.HandlerFor(cfg.Registry, promhttp.HandlerOpts{}))
	return r, nil
}

// fasthttpLogger passes on what fasthttp has to say, which is mostly about clients.
type fasthttpLogger struct{ log *slog.Logger }

func (l fasthttpLogger) Printf(format string, args ...any) {
	l.log.Debug("http: " + fmt.Sprintf(format, args...))
}

func stack() string { return string(debug.Stack()) }

// seed draws a seed that survives clients that think in floats.
func (r *Router) seed() uint64 { return rand.Uint64N(1 << 53) }

// dialect is the one that the decision's workers speak.
func (r *Router) dialect(d pairing.Decision) dialects.Dialect { return r.dialects[dialectOf(d)] }

func dialectOf(d pairing.Decision) string {
	if d.Whole != nil {
		return d.Whole.Dialect
	}
	return d.Decode.Dialect
}

// Serve serves clients on ln until Shutdown, which makes it return nil.
func (r *Router) Serve(ln net.Listener) error {
	r.mu.Lock()
	if r.stopping {
		r.mu.Unlock()
		return errors.Join(errors.New("serve: the router stops"), ln.Close())
	}
	r.listeners = append(r.listeners, ln)
	r.served.Add(1)
	r.mu.Unlock()
	defer r.served.Done()
	for wait := acceptWaitMin; ; {
		c, err := ln.Accept()
		switch {
		case err == nil:
			wait = acceptWaitMin
			r.accept(c)
		case r.draining():
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("serve %s: %w", ln.Addr(), err)
		default: // out of descriptors, most likely
			r.log.Warn("accept a connection", "err", err, "again_in", wait)
			select {
			case <-time.After(wait):
			case <-r.base.Done():
			}
			wait = min(2*wait, acceptWaitMax)
		}
	}
}

// accept serves a new connection. fasthttp's own loop is not used: it cannot be waited for.
func (r *Router) accept(nc net.Conn) {
	c := &clientConn{Conn: nc, owner: r}
	if tc, ok := nc.(*net.TCPConn); ok { // TCP_NODELAY is Go's default
		_ = tc.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepAlive, Interval: keepAlive / 3, Count: 3})
	}
	switch c.watchEnd(r.ends); {
	case r.certs != nil:
		c.Conn = r.certs.server(nc)
	case c.watched:
		c.Conn, c.asks = socket.New(nc), true
	}
	r.mu.Lock()
	full, stopping := len(r.conns) >= r.cfg.MaxConns, r.stopping
	if !full && !stopping {
		r.conns[c] = struct{}{}
	}
	r.mu.Unlock()
	if full {
		r.tooMany(nc)
	}
	if full || stopping {
		if c.unwatch != nil {
			c.unwatch()
		}
		_ = nc.Close()
		return
	}
	r.mu.Lock()
	if r.stopping {
		r.mu.Unlock()
		_ = c.Close()
		return
	}
	r.served.Add(1)
	r.mu.Unlock()
	go func() {
		defer r.served.Done()
		if !r.handshake(c) {
			_ = c.Close()
			return
		}
		r.serveConn(c)
	}()
}

// tooMany answers a connection over the limit. It does not wait: what does not fit the socket's buffer is lost.
func (r *Router) tooMany(nc net.Conn) {
	if r.certs != nil {
		return // who waits for a handshake could not read it
	}
	var resp fasthttp.Response
	resp.SetConnectionClose()
	setError(&resp, openai.Unavailable("The router has as many connections as it may."), nil)
	_ = nc.SetWriteDeadline(time.Now().Add(time.Millisecond))
	_, _ = resp.WriteTo(nc)
	r.metrics.request("other", resp.StatusCode(), "error")
}

func (r *Router) forget(c *clientConn) {
	r.mu.Lock()
	delete(r.conns, c)
	r.mu.Unlock()
}

// begin counts a request in, unless the router stops.
func (r *Router) begin() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping {
		return false
	}
	r.active++
	return true
}

func (r *Router) finish() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.active--
	if r.stopping && r.active == 0 {
		close(r.idle)
	}
}

func (r *Router) draining() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stopping
}

// Shutdown stops accepting, lets the requests in flight end while ctx lasts, then ends them with an error, and closes
// everything. It may be called once more to no effect.
func (r *Router) Shutdown(ctx context.Context) error {
	r.mu.Lock()
	if r.stopping {
		r.mu.Unlock()
		return nil
	}
	r.stopping = true
	listeners, admins := r.listeners, r.admins
	if r.active == 0 {
		close(r.idle)
	}
	r.mu.Unlock()
	var errs []error
	for _, ln := range listeners {
		if err := ln.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	select {
	case <-r.idle:
	case <-ctx.Done():
		errs = append(errs, fmt.Errorf("drain requests: %w", context.Cause(ctx)))
		r.endAll()
		select {
		case <-r.idle:
		case <-time.After(stopTimeout):
		}
	}
	r.endAll()
	stop, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	r.closeConns()
	r.errands.Close() // while there is a client to say them with
	r.client.Close()
	r.probes.Wait()
	r.bootstraps.Wait()
	if r.recaller != nil {
		errs = append(errs, r.recaller.close(stop))
	}
	r.fleet.close()
	for _, a := range admins {
		if err := a.Shutdown(stop); err != nil {
			errs = append(errs, err, a.Close())
		}
	}
	r.served.Wait()
	r.access.close()
	r.spans.close()
	if r.ends != nil {
		errs = append(errs, r.ends.Close())
	}
	return errors.Join(errs...)
}

// endAll ends all requests.
func (r *Router) endAll() {
	r.stopAll(errShutdown)
	for _, c := range r.clients() {
		c.mu.Lock()
		if l := c.leaves; l != nil {
			l.end(errShutdown) // under the lock, for the next request has the same memory
		}
		c.mu.Unlock()
	}
}

func (r *Router) clients() []*clientConn {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.conns))
}

func (r *Router) closeConns() {
	var closing sync.WaitGroup
	for _, c := range r.clients() {
		closing.Go(func() { _ = c.Close() }) // TLS has last words, for which it waits
	}
	closing.Wait()
}
