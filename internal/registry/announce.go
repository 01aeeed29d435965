package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Announcement is one entry this process keeps in the registry.
type Announcement struct {
	r   *Registry
	key string

	// Guarded by r.mu.
	value    []byte
	dirty    bool // value is newer than what etcd holds under the present lease
	closed   bool
	once     sync.Once
	put      chan struct{} // closed when the first put succeeded, or finally failed with err
	finalErr error
}

// Announce lists value as kind/id until Close, and waits until etcd holds it. From then on it is kept without further
// care: the lease is renewed, and the entry is put again when the lease or etcd's data was lost.
func (r *Registry) Announce(ctx context.Context, kind Kind, id string, value any) (*Announcement, error) {
	a, err := r.Keep(kind, id, value)
	if err != nil {
		return nil, err
	}
	select {
	case <-a.put:
		if a.finalErr != nil {
			return nil, fmt.Errorf("announce %s %s: %w", kind, id, a.finalErr)
		}
		return a, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("announce %s %s: %w", kind, id, errors.Join(ctx.Err(), a.Close()))
	}
}

// Keep is Announce for who must not wait: the entry is listed as soon as etcd can be reached.
func (r *Registry) Keep(kind Kind, id string, value any) (*Announcement, error) {
	if err := checkID(kind, id); err != nil {
		return nil, err
	}
	data, err := encodeValue(kind, id, value)
	if err != nil {
		return nil, err
	}
	a := &Announcement{r: r, key: keyOf(kind, id), value: data, dirty: true, put: make(chan struct{})}
	r.mu.Lock()
	switch {
	case r.closed || r.withdrawn:
		r.mu.Unlock()
		return nil, fmt.Errorf("announce %s %s: %w", kind, id, ErrClosed)
	case r.entries[a.key] != nil:
		r.mu.Unlock()
		return nil, fmt.Errorf("announce %s %s: this process has announced it already", kind, id)
	}
	r.entries[a.key] = a
	delete(r.doomed, a.key)
	if !r.keeping {
		r.keeping = true
		r.wg.Add(1)
		go r.keep()
	}
	r.mu.Unlock()
	r.wake()
	return a, nil
}

// Withdraw deletes every announcement while tables go on, so that nobody sends more to a part that drains.
func (r *Registry) Withdraw(ctx context.Context) error {
	r.mu.Lock()
	lease := r.lease
	r.withdrawn = true
	r.lease = 0
	for _, a := range r.entries {
		a.closed = true
		a.finish(ErrClosed)
	}
	clear(r.entries)
	r.mu.Unlock()
	if lease == 0 {
		return nil
	}
	// Revoking deletes all keys of the lease at once.
	if _, err := r.cli.Revoke(ctx, lease); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return fmt.Errorf("withdraw announcements (they expire in %s): %w", r.ttl, err)
	}
	return nil
}

func encodeValue(kind Kind, id string, value any) ([]byte, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("announce %s %s: %w", kind, id, err)
	}
	// What every reader would refuse must not get in.
	if _, err := decodeEntry(keyOf(kind, id), data); err != nil {
		return nil, fmt.Errorf("announce %s %s: %w", kind, id, err)
	}
	return data, nil
}

// Listed is closed when etcd has held the entry, or never will.
func (a *Announcement) Listed() <-chan struct{} { return a.put }

// Update replaces the entry's value, soon and without waiting for etcd. Of values that follow fast only the last may be seen.
func (a *Announcement) Update(value any) error {
	kind, id, err := splitKey(a.key)
	if err != nil {
		return err
	}
	data, err := encodeValue(kind, id, value)
	if err != nil {
		return err
	}
	a.r.mu.Lock()
	if a.closed {
		a.r.mu.Unlock()
		return fmt.Errorf("update %s: %w", a.key, ErrClosed)
	}
	a.value, a.dirty = data, true
	a.r.mu.Unlock()
	a.r.wake()
	return nil
}

// Close deletes the entry. When etcd cannot be reached it is deleted as soon as it can, or goes with the process's lease.
func (a *Announcement) Close() error {
	r := a.r
	r.mu.Lock()
	if a.closed || r.closed {
		r.mu.Unlock()
		return nil
	}
	a.closed = true
	delete(r.entries, a.key)
	lease := r.lease
	r.mu.Unlock()
	a.finish(ErrClosed)
	if lease == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(r.ctx, callTimeout)
	defer cancel()
	// A successor with the same id may have put its own already; that one stays.
	mine := clientv3.Compare(clientv3.LeaseValue(a.key), "=", lease)
	if _, err := r.cli.Txn(ctx).If(mine).Then(clientv3.OpDelete(a.key)).Commit(); err != nil {
		r.mu.Lock()
		if r.entries[a.key] == nil { // nobody has announced it again meanwhile
			r.doomed[a.key] = struct{}{}
		}
		r.mu.Unlock()
		r.wake()
		return fmt.Errorf("delete %s: %w", a.key, err)
	}
	return nil
}

// deleteDoomed deletes what Close could not.
func (r *Registry) deleteDoomed(lease clientv3.LeaseID) error {
	r.mu.Lock()
	keys := slices.Collect(maps.Keys(r.doomed))
	r.mu.Unlock()
	for _, key := range keys {
		ctx, cancel := context.WithTimeout(r.ctx, callTimeout)
		mine := clientv3.Compare(clientv3.LeaseValue(key), "=", lease)
		_, err := r.cli.Txn(ctx).If(mine).Then(clientv3.OpDelete(key)).Commit()
		cancel()
		if err != nil {
			return fmt.Errorf("delete %s: %w", key, err)
		}
		r.mu.Lock()
		delete(r.doomed, key)
		a := r.entries[key]
		if a != nil { // it was announced again while it was deleted
			a.dirty = true
		}
		r.mu.Unlock()
	}
	return nil
}

// finish releases who waits in Announce.
func (a *Announcement) finish(err error) {
	a.once.Do(func() {
		a.finalErr = err
		close(a.put)
	})
}

func (r *Registry) wake() {
	select {
	case r.kick <- struct{}{}:
	default:
	}
}

// keep is the one goroutine that renews the lease and puts entries.
func (r *Registry) keep() {
	defer r.wg.Done()
	period := r.ttl / 3
	timer := time.NewTimer(period)
	defer timer.Stop()
	var renewed time.Time
	failing := false
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-r.kick:
		case <-timer.C:
		}
		next := period
		err := r.maintain(time.Since(renewed) >= period, &renewed)
		switch {
		case r.ctx.Err() != nil:
			return
		case err != nil:
			next = retryDelay
			if !failing {
				r.log.Warn("keep announcements: etcd does not answer, trying on", "err", err)
			}
		case failing:
			r.log.Info("etcd answers again, announcements are kept")
		}
		failing = err != nil
		timer.Reset(next)
	}
}

// maintain gets or renews the lease and puts what is dirty. A lease that etcd does not know is replaced at once.
func (r *Registry) maintain(renew bool, renewed *time.Time) error {
	for attempt := 0; ; attempt++ {
		err := r.maintainOnce(renew, renewed)
		if !errors.Is(err, rpctypes.ErrLeaseNotFound) || attempt == 2 {
			return err
		}
		r.log.Warn("lease was lost, registering again", "ttl", r.ttl)
		r.dropLease()
	}
}

func (r *Registry) maintainOnce(renew bool, renewed *time.Time) error {
	r.mu.Lock()
	lease, idle := r.lease, len(r.entries) == 0 && len(r.doomed) == 0
	r.mu.Unlock()
	switch {
	case lease == 0 && idle:
		return nil
	case lease == 0:
		ctx, cancel := context.WithTimeout(r.ctx, callTimeout)
		defer cancel()
		resp, err := r.cli.Grant(ctx, int64(r.ttl/time.Second))
		if err != nil {
			return fmt.Errorf("get a lease: %w", err)
		}
		lease, *renewed = resp.ID, time.Now()
		r.mu.Lock()
		r.lease = lease
		r.mu.Unlock()
	case renew:
		ctx, cancel := context.WithTimeout(r.ctx, callTimeout)
		defer cancel()
		if _, err := r.cli.KeepAliveOnce(ctx, lease); err != nil {
			return fmt.Errorf("renew lease: %w", err)
		}
		*renewed = time.Now()
	}
	if err := r.deleteDoomed(lease); err != nil {
		return err
	}
	for {
		a, value := r.nextDirty()
		if a == nil {
			return nil
		}
		if err := r.putOne(a, value, lease); err != nil {
			return err
		}
	}
}

func (r *Registry) nextDirty() (*Announcement, []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.entries {
		if a.dirty {
			a.dirty = false
			return a, a.value
		}
	}
	return nil, nil
}

func (r *Registry) putOne(a *Announcement, value []byte, lease clientv3.LeaseID) error {
	ctx, cancel := context.WithTimeout(r.ctx, callTimeout)
	defer cancel()
	_, err := r.cli.Put(ctx, a.key, string(value), clientv3.WithLease(lease))
	r.mu.Lock()
	closed := a.closed
	if err != nil {
		a.dirty = true
	}
	r.mu.Unlock()
	switch {
	case err != nil:
		return fmt.Errorf("put %s: %w", a.key, err)
	case closed:
		// Close ran beside the put and may have deleted before it landed.
		if _, err := r.cli.Delete(ctx, a.key); err != nil {
			return fmt.Errorf("delete %s: %w", a.key, err)
		}
	default:
		a.finish(nil)
	}
	return nil
}

func (r *Registry) dropLease() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lease = 0
	clear(r.doomed) // they went with it
	for _, a := range r.entries {
		a.dirty = true
	}
}
