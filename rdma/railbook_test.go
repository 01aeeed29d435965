package rdma

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/transfer"
)

// bookOf is a link without lanes that knows the rails of both ends.
func bookOf(t *testing.T, dialled bool, lanes int, own, theirs []railInfo, kicks *atomic.Int32) *link {
	t.Helper()
	l := &link{dialled: dialled, setup: &transfer.Setup{Lanes: lanes, RailsChanged: func() { kicks.Add(1) }, Tell: func([]byte) {}}, lanes: make(map[int]*lane)}
	if err := l.rails.open(l, own, encodeRails(theirs)); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestPlan(t *testing.T) {
	var kicks atomic.Int32
	one := []railInfo{roceRail("a", 10, 1, 0, 1, 24, true), roceRail("b", 10, 2, 0, 1, 24, true)}
	two := []railInfo{roceRail("c", 10, 2, 0, 2, 24, true), roceRail("d", 10, 1, 0, 2, 24, true)}
	halved := []railInfo{two[0], two[1]}
	halved[0].up = false
	for _, c := range []struct {
		name   string
		lanes  int
		theirs []railInfo
		want   int
	}{{"as many as asked for", 4, two, 4}, {"one a pair at least", 1, two, 2}, {"rounded up", 3, two, 4}, {"half of them", 4, halved, 2}, {"none", 4, nil, 0}} {
		a := bookOf(t, true, c.lanes, one, c.theirs, &kicks)
		b := bookOf(t, false, c.lanes, c.theirs, one, &kicks)
		p, q := a.rails.plan(), b.rails.plan()
		if len(p) != c.want || len(q) != c.want {
			t.Errorf("%s: %v and %v", c.name, p, q)
		}
		for i := range min(len(p), len(q)) {
			if p[i] != q[i] {
				t.Errorf("%s: lane %d is for %+v and %+v", c.name, i, p[i], q[i])
			}
		}
		if w := a.Wanting(); w != c.want {
			t.Errorf("%s: %d lanes are wanted", c.name, w)
		}
	}
}

// A pair on which no lane can be made is left alone for a while, longer each time, until something changes.
func TestGrudge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var kicks atomic.Int32
		rails := []railInfo{roceRail("a", 10, 1, 0, 1, 24, true), roceRail("b", 10, 2, 0, 1, 24, true)}
		l := bookOf(t, true, 2, rails, rails, &kicks)
		bad := l.rails.usable[0]
		for i, wait := range []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond} {
			l.mu.Lock()
			l.rails.blame(l, &bad, errors.New("no packet gets through"))
			l.mu.Unlock()
			if n, p := l.Wanting(), l.choose(); n != 1 || p == nil || p.dial != 1 {
				t.Errorf("after failure %d: %d wanted, %+v chosen", i, n, p)
			}
			if s := l.Rails()[0]; s.State != "down" || !strings.Contains(s.Why, "no packet") {
				t.Errorf("%+v", s)
			}
			time.Sleep(wait - time.Millisecond) // in a bubble
			if kicks.Load() != int32(i) || l.Wanting() != 1 {
				t.Errorf("failure %d is forgotten after less than %v", i, wait)
			}
			time.Sleep(2 * time.Millisecond)
			synctest.Wait()
			if kicks.Load() != int32(i)+1 || l.Wanting() != 2 {
				t.Errorf("after %v: %d kicks, %d wanted", wait, kicks.Load(), l.Wanting())
			}
		}
		l.mu.Lock()
		l.rails.blame(l, &bad, errors.New("no packet gets through"))
		l.mu.Unlock()
		down := []railInfo{rails[0], rails[1]}
		down[1].up = false
		if err := l.Hear(encodeRails(down)); err != nil || l.Wanting() != 1 || l.choose().dial != 0 {
			t.Errorf("the other end's news: %v, %d wanted", err, l.Wanting())
		}
		if err := l.Hear(encodeRails(down[:1])); !errors.Is(err, transfer.ErrProtocol) {
			t.Errorf("a rail is gone: %v", err)
		}
		l.rails.stop()
	})
}
