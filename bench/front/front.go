// Package front is the router in a benchmark: `headrace router` over workers that do not change, without a registry. It must
// not know what is measured.
package front

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/pairing"
)

// drainTimeout is how long streams may go on when the router is to stop.
const drainTimeout = 5 * time.Second

// Listen opens n ports of loopback, or none.
func Listen(n int) ([]net.Listener, error) {
	var list []net.Listener
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			for _, open := range list {
				err = errors.Join(err, open.Close())
			}
			return nil, err
		}
		list = append(list, l)
	}
	return list, nil
}

// Fixed is a fleet that does not change.
type Fixed []pairing.Worker

func (f Fixed) Workers() []pairing.Worker { return f }
func (Fixed) Changed() <-chan struct{}    { return nil }

// Serve runs a router over workers until ctx ends. ready is told where its clients and its admin listener are. The source and the key
// of cfg are Serve's own.
func Serve(ctx context.Context, cfg router.Config, workers []pairing.Worker, ready func(clients, admin string) error) error {
	cfg.Source, cfg.ClusterKey = Fixed(workers), []byte("the key of a benchmark's cluster")
	r, err := router.New(cfg)
	if err != nil {
		return err
	}
	l, err := Listen(2)
	if err != nil {
		return err
	}
	ended := make(chan error, 2)
	go func() { ended <- r.Serve(l[0]) }()
	go func() { ended <- r.ServeAdmin(l[1]) }()
	if err := ready(l[0].Addr().String(), l[1].Addr().String()); err != nil {
		return err
	}
	<-ctx.Done()
	stop, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	return errors.Join(r.Shutdown(stop), <-ended, <-ended)
}
