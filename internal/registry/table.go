package registry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Table is the registry's content in memory, kept by a watch.
type Table struct {
	r    *Registry
	view atomic.Pointer[View]

	mu      sync.Mutex // guards changed and err
	changed chan struct{}
	err     error

	// Owned by the goroutine that follows.
	entries  map[string]any
	revision int64
	cluster  uint64
}

// Watch reads the registry once, within ctx, and then keeps the table until ctx ends or the registry closes.
func (r *Registry) Watch(ctx context.Context) (*Table, error) {
	t := &Table{r: r, changed: make(chan struct{})}
	t.view.Store(&View{})
	if err := t.resync(ctx); err != nil {
		return nil, fmt.Errorf("watch registry: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("watch registry: %w", ErrClosed)
	}
	r.wg.Add(1)
	go t.run(ctx)
	return t, nil
}

// Snapshot returns the last view that was had, never nil. It must not be changed.
func (t *Table) Snapshot() *View { return t.view.Load() }

// Changed returns a channel that is closed at the next change. Take it before the snapshot it guards.
func (t *Table) Changed() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changed
}

// Err says why the view may be old; nil while the table follows etcd.
func (t *Table) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

func (t *Table) setErr(err error) {
	t.mu.Lock()
	before := t.err
	t.err = err
	t.mu.Unlock()
	switch {
	case before == nil && err != nil:
		t.r.log.Warn("registry cannot be followed, the last view is used", "err", err)
	case before != nil && err == nil:
		t.r.log.Info("registry is followed again")
	}
}

func (t *Table) run(ctx context.Context) {
	defer t.r.wg.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(t.r.ctx, cancel)
	defer stop()
	for {
		err := t.follow(ctx)
		for ctx.Err() == nil {
			if err != nil {
				t.setErr(err)
				wait := time.NewTimer(retryDelay)
				select {
				case <-ctx.Done():
				case <-wait.C:
				}
				wait.Stop()
			}
			if err = t.resync(ctx); err == nil {
				break
			}
		}
		if ctx.Err() != nil {
			t.mu.Lock()
			t.err = ErrClosed
			t.mu.Unlock()
			return
		}
		t.setErr(nil)
	}
}

// follow applies events until the watch ends or it is time to look whether etcd still holds what it held.
// nil asks for a resync at once.
func (t *Table) follow(ctx context.Context) error {
	// A watch that etcd ended, and one on an etcd that went away, must end here too.
	wctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	events := t.r.cli.Watch(wctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(t.revision+1))
	check := time.NewTicker(t.r.resyncEvery)
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-check.C:
			ok, err := t.current(ctx)
			if err != nil {
				t.setErr(err) // the watch itself goes on and may be first to come back
				continue
			}
			t.setErr(nil)
			if !ok {
				return nil
			}
		case resp, open := <-events:
			switch {
			case !open:
				return errors.New("watch ended")
			case resp.CompactRevision != 0:
				return nil
			case resp.Err() != nil:
				return resp.Err()
			case resp.Header.ClusterId != t.cluster:
				return nil
			}
			t.apply(resp)
			t.setErr(nil)
		}
	}
}

// current tells whether etcd's history still continues the one this table follows. It does not when etcd was
// replaced or lost its data: revisions then start anew, and the watch would wait in vain for one far ahead.
func (t *Table) current(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	resp, err := t.r.cli.Get(ctx, prefix, clientv3.WithCountOnly(), clientv3.WithPrefix())
	if err != nil {
		return false, fmt.Errorf("reach etcd: %w", err)
	}
	return resp.Header.ClusterId == t.cluster && resp.Header.Revision >= t.revision, nil
}

// resync reads everything.
func (t *Table) resync(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	resp, err := t.r.cli.Get(ctx, prefix, clientv3.WithPrefix())
	if err != nil {
		return fmt.Errorf("read registry: %w", err)
	}
	t.entries = make(map[string]any, len(resp.Kvs))
	for _, kv := range resp.Kvs {
		t.set(kv)
	}
	t.revision, t.cluster = resp.Header.Revision, resp.Header.ClusterId
	t.publish()
	return nil
}

func (t *Table) apply(resp clientv3.WatchResponse) {
	for _, ev := range resp.Events {
		if ev.Type == clientv3.EventTypeDelete {
			delete(t.entries, string(ev.Kv.Key))
		} else {
			t.set(ev.Kv)
		}
	}
	t.revision = max(t.revision, resp.Header.Revision)
	if len(resp.Events) > 0 {
		t.publish()
	}
}

func (t *Table) set(kv *mvccpb.KeyValue) {
	entry, err := decodeEntry(string(kv.Key), kv.Value)
	if err != nil {
		t.r.log.Warn("registry holds an entry that cannot be read, leaving it out", "err", err)
		delete(t.entries, string(kv.Key))
		return
	}
	t.entries[string(kv.Key)] = entry
}

func (t *Table) publish() {
	t.view.Store(newView(t.revision, t.entries))
	t.mu.Lock()
	close(t.changed)
	t.changed = make(chan struct{})
	t.mu.Unlock()
}
