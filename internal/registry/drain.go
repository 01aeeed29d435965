package registry

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// drainTTL is how long a drain is kept that nobody has taken back: the process that it is about is long gone.
const drainTTL = 7 * 24 * time.Hour

// Drain says that a worker's process is to get no new requests: routers see it with Weight 0. It is another part's word, or a person's, and
// lives without whoever gave it. A process that is started later under the same id is not meant.
type Drain struct {
	ID      string    `json:"id"`
	PID     int       `json:"pid"`
	Host    string    `json:"host"`
	Started time.Time `json:"started"` // of the worker
}

// means tells whether the drain is about this process.
func (d *Drain) means(w *Worker) bool {
	return d.ID == w.ID && d.PID == w.PID && d.Host == w.Host && d.Started.Equal(w.Started)
}

// Drain takes a worker's process out of what routers choose from. It waits for etcd, not for routers.
func (r *Registry) Drain(ctx context.Context, w Worker) error {
	data, err := encodeValue(KindDrain, w.ID, Drain{w.ID, w.PID, w.Host, w.Started})
	if err != nil {
		return err
	}
	lease, err := r.cli.Grant(ctx, int64(drainTTL/time.Second))
	if err == nil {
		_, err = r.cli.Put(ctx, keyOf(KindDrain, w.ID), string(data), clientv3.WithLease(lease.ID))
	}
	if err != nil {
		return fmt.Errorf("drain worker %s: %w", w.ID, err)
	}
	return nil
}

// ErrNotDrained is what Undrain answers where there is nothing to take back.
var ErrNotDrained = errors.New("it is not drained")

// Undrain takes a Drain back.
func (r *Registry) Undrain(ctx context.Context, id string) error {
	resp, err := r.cli.Delete(ctx, keyOf(KindDrain, id))
	if err == nil && resp.Deleted == 0 {
		err = ErrNotDrained
	}
	if err != nil {
		return fmt.Errorf("undrain worker %s: %w", id, err)
	}
	return nil
}
