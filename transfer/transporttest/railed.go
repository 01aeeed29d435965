package transporttest

import (
	"context"
	"errors"
	"net"
	"sync"

	"github.com/headrace/headrace/transfer"
)

// Rail is a one-sided Fake over a rail that can be taken down and brought back, as a network card's port can. One Rail
// serves one daemon; those of the two ends of a channel are joined by Partner.
type Rail struct {
	Fake
	Refusal error // what Register answers, where it is not nil

	joint *railJoint
}

// railJoint is what two daemons' rails have in common.
type railJoint struct {
	fake  Fake
	mu    sync.Mutex
	down  bool
	links map[*railLink]struct{}
}

// NewRails makes the transports of two daemons over one rail.
func NewRails() (a, b *Rail) {
	j := &railJoint{links: make(map[*railLink]struct{})}
	j.fake.OneSided = true
	return &Rail{joint: j}, &Rail{joint: j}
}

var (
	_ transfer.Transport = (*Rail)(nil)
	_ transfer.Railed    = (*railLink)(nil)
)

// Register implements transfer.Registrar.
func (r *Rail) Register(region *transfer.Region) ([]byte, error) {
	if r.Refusal != nil {
		return nil, r.Refusal
	}
	return fakeKey(region), nil
}

// Dial implements transfer.Transport.
func (r *Rail) Dial(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return r.meet(ctx, s, 0)
}

// Accept implements transfer.Transport.
func (r *Rail) Accept(ctx context.Context, s *transfer.Setup) (transfer.Link, error) {
	return r.meet(ctx, s, 1)
}

func (r *Rail) meet(ctx context.Context, s *transfer.Setup, end int) (transfer.Link, error) {
	link, err := r.joint.fake.meet(ctx, s, end)
	if err != nil {
		return nil, err
	}
	l := &railLink{fakeLink: link.(*fakeLink), joint: r.joint}
	r.joint.mu.Lock()
	defer r.joint.mu.Unlock()
	r.joint.links[l] = struct{}{}
	return l, nil
}

// errRailDown is what lanes on it fail with.
var errRailDown = errors.New("the rail is down")

// Set takes the rail down or brings it back, at both ends.
func (r *Rail) Set(up bool) {
	r.joint.mu.Lock()
	r.joint.down = !up
	var links []*railLink
	for l := range r.joint.links {
		links = append(links, l)
	}
	r.joint.mu.Unlock()
	for _, l := range links {
		if up {
			l.setup.RailsChanged()
			l.setup.Tell([]byte("up"))
			continue
		}
		for _, i := range l.Lanes() {
			l.Abort(i, errRailDown)
		}
	}
}

type railLink struct {
	*fakeLink
	joint *railJoint
}

func (l *railLink) Close() error {
	l.joint.mu.Lock()
	delete(l.joint.links, l)
	l.joint.mu.Unlock()
	return l.fakeLink.Close()
}

// Lanes implements transfer.Railed.
func (l *railLink) Lanes() (lanes []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, x := range l.lanes {
		select {
		case <-x.dead:
		default:
			lanes = append(lanes, i)
		}
	}
	return lanes
}

// Wanting implements transfer.Railed.
func (l *railLink) Wanting() int {
	l.joint.mu.Lock()
	down := l.joint.down
	l.joint.mu.Unlock()
	if down {
		return 0
	}
	return max(0, l.setup.Lanes-len(l.Lanes()))
}

// Rail implements transfer.Railed.
func (*railLink) Rail(int) string { return "fake0" }

// Rails implements transfer.Railed.
func (l *railLink) Rails() []transfer.RailStatus {
	s := transfer.RailStatus{Key: "fake0", Name: "fake0", State: "up", Why: "in one process", Lanes: l.setup.Lanes}
	if l.joint.mu.Lock(); l.joint.down {
		s.State, s.Why = "down", errRailDown.Error()
	}
	l.joint.mu.Unlock()
	return []transfer.RailStatus{s}
}

// Hear implements transfer.Railed.
func (l *railLink) Hear(news []byte) error {
	if string(news) != "up" {
		return transfer.ErrProtocol
	}
	return nil
}

// Extend implements transfer.Extender. The stream serves to agree on the lane alone.
func (l *railLink) Extend(lane int, conn net.Conn) error {
	defer conn.Close()
	l.joint.mu.Lock()
	defer l.joint.mu.Unlock()
	if l.joint.down {
		return errRailDown
	}
	go l.add(lane).run()
	return nil
}
