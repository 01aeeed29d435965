// Package registry says who is alive: every part announces itself in etcd under a lease and reads the others
// from a table that a watch keeps in memory.
//
// It is never on a request's path: a table goes on serving its last view while etcd is away, and an announcement
// comes back by itself once etcd does. It must not know what a worker or a router does with an entry.
package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

const (
	defaultTTL = 5 * time.Second
	// callTimeout bounds each call to etcd: longer than a slow disk's fsync, shorter than a lease.
	callTimeout = 2 * time.Second
	// retryDelay is the wait after a call that failed.
	retryDelay = 200 * time.Millisecond
	// resyncEvery bounds how long a table can miss a change that no watch told it of, as after etcd lost its data.
	resyncEvery = 10 * time.Second
)

// ErrClosed is the answer of a registry or an announcement that was closed.
var ErrClosed = errors.New("registry is closed")

// Config says which etcd to use. Endpoints is all that must be given.
type Config struct {
	Endpoints []string      // host:port, http://host:port or unix:///path
	TTL       time.Duration // how long a silent process stays listed; 5 s, whole seconds, etcd's own least is 1 s or more
	Logger    *slog.Logger
}

// Registry is a process's connection to etcd with the lease of all it announces.
type Registry struct {
	cli *clientv3.Client
	ttl time.Duration
	log *slog.Logger
	// resyncEvery is a field so that a test need not wait.
	resyncEvery time.Duration

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // keeper and tables
	kick   chan struct{}  // capacity 1: the keeper has something to put

	mu        sync.Mutex // guards what follows; never held over a call to etcd
	closed    bool
	withdrawn bool // nothing more is announced
	keeping   bool
	lease     clientv3.LeaseID // 0 while there is none
	entries   map[string]*Announcement
	doomed    map[string]struct{} // keys that could not be deleted
	abandons  bool                // Close leaves the lease to expire, as a killed process does
}

// Open connects to etcd. An etcd that is not there yet is no error: calls wait for it within their own deadlines.
func Open(ctx context.Context, cfg Config) (*Registry, error) {
	if len(cfg.Endpoints) == 0 {
		return nil, errors.New("open registry: no etcd endpoint given")
	}
	if cfg.TTL == 0 {
		cfg.TTL = defaultTTL
	}
	if cfg.TTL < time.Second {
		return nil, fmt.Errorf("open registry: TTL %s is below etcd's least, 1s", cfg.TTL)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("open registry: %w", err)
	}
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: cfg.Endpoints,
		Logger:    zap.NewNop(),
		// A stopped etcd answers neither calls nor pings; without pings a watch on it would stay silent for ever.
		// etcd refuses clients that ping more often than every 5 s.
		DialKeepAliveTime:    6 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
		PermitWithoutStream:  true,
		DialOptions: []grpc.DialOption{
			// gRPC's own backoff grows to two minutes: as long would a part stay unlisted after etcd came back.
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
				MinConnectTimeout: callTimeout,
			}),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("open registry at %v: %w", cfg.Endpoints, err)
	}
	rctx, cancel := context.WithCancel(context.Background())
	return &Registry{
		cli: cli, ttl: cfg.TTL, log: cfg.Logger, resyncEvery: resyncEvery,
		ctx: rctx, cancel: cancel, kick: make(chan struct{}, 1),
		entries: map[string]*Announcement{}, doomed: map[string]struct{}{},
	}, nil
}

// Ping asks etcd for an answer, so that a command can say "not there" at once.
func (r *Registry) Ping(ctx context.Context) error {
	if _, err := r.cli.Get(ctx, prefix, clientv3.WithCountOnly(), clientv3.WithPrefix()); err != nil {
		return fmt.Errorf("reach etcd at %v: %w", r.cli.Endpoints(), err)
	}
	return nil
}

// Prune deletes the entries that dead says yes to: what killed processes left behind, before their leases expire.
func (r *Registry) Prune(ctx context.Context, dead func(entry any) bool) error {
	resp, err := r.cli.Get(ctx, prefix, clientv3.WithPrefix())
	if err != nil {
		return fmt.Errorf("read registry: %w", err)
	}
	for _, kv := range resp.Kvs {
		entry, err := decodeEntry(string(kv.Key), kv.Value)
		if err != nil || !dead(entry) {
			continue
		}
		// Only the very value that was looked at: its owner may be back by now.
		cmp := clientv3.Compare(clientv3.ModRevision(string(kv.Key)), "=", kv.ModRevision)
		if _, err := r.cli.Txn(ctx).If(cmp).Then(clientv3.OpDelete(string(kv.Key))).Commit(); err != nil {
			return fmt.Errorf("delete %s: %w", kv.Key, err)
		}
	}
	return nil
}

// Close withdraws every announcement, ends the tables' watches and disconnects. Tables keep their last view.
func (r *Registry) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	r.wg.Wait()

	var errs []error
	r.mu.Lock()
	if r.abandons {
		r.lease = 0
	}
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	errs = append(errs, r.Withdraw(ctx))
	if err := r.cli.Close(); err != nil && !errors.Is(err, context.Canceled) {
		errs = append(errs, fmt.Errorf("disconnect from etcd: %w", err))
	}
	return errors.Join(errs...)
}
