package transporttest

import (
	"sync"
	"testing"

	"github.com/headrace/headrace/transfer"
)

// observer notes what it is told of lanes.
type observer struct {
	mu            sync.Mutex
	flows         []transfer.Flow
	ended         int // lanes, once each
	twice         int // lanes that ended more than once
	begun, closed int // channels
}

func (o *observer) Channel() transfer.Gauge {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.begun++
	return &noted{o: o}
}

type noted struct {
	o      *observer
	closed bool
}

func (n *noted) Lane(f transfer.Flow) (end func()) {
	n.o.mu.Lock()
	defer n.o.mu.Unlock()
	n.o.flows = append(n.o.flows, f)
	over := false
	return func() {
		n.o.mu.Lock()
		defer n.o.mu.Unlock()
		if over {
			n.o.twice++
			return
		}
		over = true
		n.o.ended++
	}
}

func (n *noted) Wire() transfer.Wire { return transfer.Wire{Source: "test", SentBytes: 42} }

func (n *noted) Close() {
	n.o.mu.Lock()
	defer n.o.mu.Unlock()
	if !n.closed {
		n.closed = true
		n.o.closed++
	}
}

// Measured holds that an observer is told of every lane when its ends know each other, and once when it ends, and that status
// shows what it says. flows checks what the lanes are known by.
func Measured(t *testing.T, f Factory, flows func(t *testing.T, f transfer.Flow)) {
	t.Helper()
	var o observer
	p := NewPair(t, f, Options{Config: func(c *transfer.Config) {
		if f.Config != nil {
			f.Config(c)
		}
		c.Observer = &o
	}})
	q := p.NewRequest(NewRand(), 300, 0, patience)
	q.Present(t, nil)
	q.Bind(t)
	q.PushAll(t, nil)
	q.Settled(t, nil)
	lanes := 0
	for _, s := range []*Side{p.P, p.D} {
		for _, c := range s.Engine.Status().Channels {
			lanes += c.LanesUp
			if c.Wire.Source != "test" || c.Wire.SentBytes != 42 {
				t.Errorf("status says %+v", c.Wire)
			}
		}
	}
	o.mu.Lock()
	if len(o.flows) != lanes || lanes == 0 || o.ended != 0 {
		t.Errorf("the observer was told of %d lanes and of the end of %d, and %d are up", len(o.flows), o.ended, lanes)
	}
	for _, x := range o.flows {
		flows(t, x)
	}
	o.mu.Unlock()
	p.Close(t)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended != len(o.flows) || o.twice != 0 || o.closed != o.begun {
		t.Errorf("of %d lanes %d ended, %d of them twice; of %d channels %d were closed", len(o.flows), o.ended, o.twice, o.begun, o.closed)
	}
}
