package router

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/openai"
)

const (
	// heldBytesMax is what requests' bodies may take of memory where nothing else is said.
	heldBytesMax = 1 << 30
	// uncountedBytesMax is the largest body that is not counted: the limit on connections bounds these.
	uncountedBytesMax = 16 << 10
	// roomRetryAfter is what a client is told to wait whose body found no room.
	roomRetryAfter = time.Second
)

// errNoRoom ends a request whose body would be more than the router may hold.
var errNoRoom = errors.New("no room for the body")

// bodies bounds the memory that the bodies of requests take together, from their reading to the answer's end.
type bodies struct {
	max     int64
	held    atomic.Int64
	refused prometheus.Counter
}

func newBodies(limit int64, reg *prometheus.Registry, refused prometheus.Counter) *bodies {
	b := &bodies{max: limit, refused: refused}
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "headrace", Subsystem: "router", Name: "bodies_bytes",
		Help: "Memory of requests' bodies, from their reading to the answer's end; bodies of 16 KiB and less are not counted."}, func() float64 { return float64(b.held.Load()) }))
	return b
}

// held is what one request's body takes of bodies. It belongs to one goroutine.
type held struct {
	of *bodies
	n  int64
}

// grow takes n bytes more.
func (h *held) grow(n int64) error {
	if h.of == nil {
		return nil
	}
	if h.of.held.Add(n) > h.of.max {
		h.of.held.Add(-n)
		h.of.refused.Inc()
		return errNoRoom
	}
	h.n += n
	return nil
}

// release gives back everything.
func (h *held) release() {
	if h.n > 0 {
		h.of.held.Add(-h.n)
		h.n = 0
	}
}

// noRoom is what the client is told.
func noRoom() *openai.Error {
	return openai.TooManyRequests(roomRetryAfter, "The requests that the router serves and queues have as much in their bodies as it may hold. No engine has seen this one. Please retry.")
}

// checkHeld fills in the limit, and says what it cannot be.
func (c *Config) checkHeld() error {
	if c.MaxHeldBytes == 0 {
		c.MaxHeldBytes = max(heldBytesMax, int64(c.MaxBodyBytes))
	}
	if c.MaxHeldBytes < int64(c.MaxBodyBytes) {
		return fmt.Errorf("configure router: bodies may take %d bytes together, less than the %d of one, which could never be served: raise max-held-bytes or lower max-body", c.MaxHeldBytes, c.MaxBodyBytes)
	}
	return nil
}
