package rdma

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer"
)

// Config has useful zero values.
type Config struct {
	Devices      []string      // names of those to use, as mlx5_0; empty: all with an active port
	GIDIndex     int           // of RoCE ports' address tables, from 1; 0 chooses a RoCE v2 address, for IPv4 if there is one
	PKeyIndex    int           // in the ports' tables of partition keys
	ServiceLevel int           // 0 to 15
	TrafficClass int           // 0 to 255; DSCP is its upper six bits
	Spin         time.Duration // how long to poll for completions before parking; 0 parks at once
}

type transport struct {
	cfg Config

	mu       sync.Mutex
	rails    []*rail // open devices' ports; nil until they are found
	closed   bool
	regions  map[*transfer.Region]*registration
	regionMu sync.RWMutex // guards regions; a leaf
}

var (
	_ transfer.Transport = (*transport)(nil)
	_ transfer.Registrar = (*transport)(nil)
)

// Default makes the transport over all devices there are.
func Default() transfer.Transport { return New(Config{}) }

// New makes the transport. Devices are opened when it is first probed.
func New(cfg Config) transfer.Transport {
	return &transport{cfg: cfg, regions: make(map[*transfer.Region]*registration)}
}

func (*transport) Name() string { return "rdma" }
func (*transport) Local() bool  { return false }

// Probe looks for ports that carry traffic. What it found stays open.
func (t *transport) Probe() error {
	_, err := t.open()
	return err
}

// open opens the devices once there are any.
func (t *transport) open() ([]*rail, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, net.ErrClosed
	}
	if t.rails == nil {
		rails, err := findRails(&t.cfg)
		if err != nil {
			return nil, err
		}
		t.rails = rails
	}
	return t.rails, nil
}

// Close closes the devices. Links and regions are gone by then.
func (t *transport) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	var errs []error
	t.regionMu.Lock()
	for r, reg := range t.regions {
		errs = append(errs, reg.close())
		delete(t.regions, r)
	}
	t.regionMu.Unlock()
	for _, r := range t.rails {
		errs = append(errs, r.close())
	}
	t.rails = nil
	return errors.Join(errs...)
}

// Dial sets up all lanes at once.
func (t *transport) Dial(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return t.join(ctx, s, func(i int) (int, net.Conn, error) {
		conn, err := s.DialStream(ctx, i)
		return i, conn, err
	})
}

// Accept waits for all lanes.
func (t *transport) Accept(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return t.join(ctx, s, func(int) (int, net.Conn, error) { return s.AcceptStream(ctx) })
}
