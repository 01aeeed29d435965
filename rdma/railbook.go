package rdma

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/headrace/headrace/transfer"
)

// railBook is what a link knows of the rails of both ends. Guarded by link.mu.
type railBook struct {
	own, theirs []railInfo
	possible    []pair // as if all rails were up: what lanes are shared out among
	usable      []pair // both rails are up
	alone       map[int]string
	lanes       int // for each pair
	grudges     map[[2]int]*grudge
	stopped     bool
}

// grudge is held against a pair on which a lane could not be made.
type grudge struct {
	fails int
	until time.Time
	timer *time.Timer
	err   error
}

// A pair on which lanes cannot be made is tried again after the first of these, then after twice as long, up to the last.
const (
	grudgeFirst = 100 * time.Millisecond
	grudgeLast  = 10 * time.Second
)

// open takes both ends' lists. The link is nobody else's yet.
func (b *railBook) open(l *link, own []railInfo, theirs []byte) (err error) {
	if b.theirs, err = parseRails(theirs); err != nil {
		return err
	}
	b.own, b.grudges = own, make(map[[2]int]*grudge)
	b.work(l)
	return nil
}

// work pairs the rails anew.
func (b *railBook) work(l *link) {
	dial, accept := b.own, b.theirs
	if !l.dialled {
		dial, accept = accept, dial
	}
	b.possible, _ = match(dial, accept, true)
	b.usable, b.alone = match(dial, accept, false)
	b.lanes = max(1, (l.setup.Lanes+len(b.possible)-1)/max(1, len(b.possible)))
}

// plan shares the first lanes out, a round over all pairs at a time. Both ends come to the same.
func (b *railBook) plan() (lanes []pair) {
	for range b.lanes {
		lanes = append(lanes, b.usable...)
	}
	return lanes[:min(len(lanes), railsMax)]
}

// mayChange says whether there may be a pair later: a rail is down, which may come up, perhaps with another address.
func (b *railBook) mayChange() bool {
	down := func(r railInfo) bool { return !r.up }
	return slices.ContainsFunc(b.own, down) || slices.ContainsFunc(b.theirs, down)
}

func (b *railBook) noneErr() error {
	var whys []string
	for i, why := range b.alone {
		whys = append(whys, fmt.Sprintf("rail %d: %s", i, why))
	}
	slices.Sort(whys)
	return errors.New("no rail reaches the other end: " + strings.Join(whys, "; "))
}

// setOwn takes a new list of this end's rails.
func (b *railBook) setOwn(l *link, own []railInfo) {
	b.own = own
	b.changed(l)
}

// changed pairs anew, and forgets what was held against pairs: the reason may be gone.
func (b *railBook) changed(l *link) {
	b.work(l)
	for _, g := range b.grudges {
		g.timer.Stop()
	}
	clear(b.grudges)
}

// blame holds it against a pair that a lane could not be made on it.
func (b *railBook) blame(l *link, p *pair, err error) {
	if b.stopped {
		return
	}
	key := [2]int{p.dial, p.accept}
	g := b.grudges[key]
	if g == nil {
		g = &grudge{}
		b.grudges[key] = g
	} else {
		g.timer.Stop()
	}
	wait := min(grudgeFirst<<min(g.fails, 16), grudgeLast)
	g.fails++
	g.err, g.until = err, time.Now().Add(wait)
	g.timer = time.AfterFunc(wait, l.setup.RailsChanged)
}

func (b *railBook) praise(p *pair) {
	key := [2]int{p.dial, p.accept}
	if g := b.grudges[key]; g != nil {
		g.timer.Stop()
		delete(b.grudges, key)
	}
}

func (b *railBook) stop() {
	b.stopped = true
	for _, g := range b.grudges {
		g.timer.Stop()
	}
}

// lack is how many lanes a pair should have beside those that it has. l.mu is held.
func (l *link) lack(p *pair) int {
	n := l.rails.lanes
	for _, x := range l.lanes {
		if x.isUp() && l.pairOf(x) == [2]int{p.dial, p.accept} {
			n--
		}
	}
	return n
}

// pairOf is the pair of rails that a lane goes over.
func (l *link) pairOf(x *lane) [2]int {
	if l.dialled {
		return [2]int{x.rail.index, int(x.peer.rail)}
	}
	return [2]int{int(x.peer.rail), x.rail.index}
}

// choose gives the pair that lacks most lanes, nil for none.
func (l *link) choose() (best *pair) {
	l.mu.Lock()
	defer l.mu.Unlock()
	most, now := 0, time.Now()
	for i := range l.rails.usable {
		p := &l.rails.usable[i]
		if g := l.rails.grudges[[2]int{p.dial, p.accept}]; g != nil && now.Before(g.until) {
			continue
		}
		if n := l.lack(p); n > most {
			most, best = n, &pair{p.dial, p.accept, p.how}
		}
	}
	return best
}

// Wanting implements transfer.Railed.
func (l *link) Wanting() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for i := range l.rails.usable {
		p := &l.rails.usable[i]
		if g := l.rails.grudges[[2]int{p.dial, p.accept}]; g == nil || !now.Before(g.until) {
			n += max(0, l.lack(p))
		}
	}
	return n
}

// Lanes implements transfer.Railed.
func (l *link) Lanes() (lanes []int) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for i := range l.lanes {
		lanes = append(lanes, i)
	}
	slices.Sort(lanes)
	return lanes
}

// Rail implements transfer.Railed.
func (l *link) Rail(lane int) string {
	x := l.lane(lane)
	if x == nil {
		return ""
	}
	return railKey(x.rail.found.name(), l.peerName(int(x.peer.rail)))
}

func railKey(own, theirs string) string { return own + ">" + theirs }

func (l *link) peerName(rail int) string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if rail < len(l.rails.theirs) {
		return l.rails.theirs[rail].name
	}
	return fmt.Sprintf("rail %d", rail)
}

// Rails implements transfer.Railed.
func (l *link) Rails() (list []transfer.RailStatus) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	b := &l.rails
	for _, p := range b.possible {
		own, theirs := p.dial, p.accept
		if !l.dialled {
			own, theirs = theirs, own
		}
		s := transfer.RailStatus{Name: b.own[own].name, Peer: b.theirs[theirs].name, State: "up", Why: p.how, Lanes: b.lanes}
		s.Key = railKey(s.Name, s.Peer)
		g := b.grudges[[2]int{p.dial, p.accept}]
		switch {
		case !b.own[own].up:
			s.State, s.Why = "down", l.local[own].now().why
		case !b.theirs[theirs].up:
			s.State, s.Why = "down", "the other end's port carries no traffic"
		case g != nil:
			s.State, s.Why = "down", g.err.Error()
		}
		list = append(list, s)
	}
	for i := range b.own {
		if slices.ContainsFunc(b.possible, func(p pair) bool { return l.dialled && p.dial == i || !l.dialled && p.accept == i }) {
			continue
		}
		s := transfer.RailStatus{Key: railKey(b.own[i].name, ""), Name: b.own[i].name, State: "down", Why: "no rail of the other end reaches it"}
		if !b.own[i].up {
			s.Why = l.local[i].now().why
		} else if why := b.alone[i]; l.dialled && why != "" {
			s.Why = why
		}
		list = append(list, s)
	}
	return list
}

// Hear implements transfer.Railed: the other end's rails have changed. Lanes on those that are gone, or have another
// address, are not waited for.
func (l *link) Hear(news []byte) error {
	theirs, err := parseRails(news)
	if err != nil {
		return err
	}
	l.mu.Lock()
	if len(theirs) != len(l.rails.theirs) {
		l.mu.Unlock()
		return fmt.Errorf("%w: %d rails have become %d", transfer.ErrProtocol, len(l.rails.theirs), len(theirs))
	}
	l.rails.theirs = theirs
	l.rails.changed(l)
	var dead []*lane
	for _, x := range l.lanes {
		if t := &theirs[min(int(x.peer.rail), len(theirs)-1)]; !t.up || t.gid != x.peer.gid {
			dead = append(dead, x)
		}
	}
	l.mu.Unlock()
	for _, x := range dead {
		go x.fail(fmt.Errorf("%s of the other end is down, or has another address", l.peerName(int(x.peer.rail))))
	}
	l.setup.RailsChanged()
	return nil
}

// changed says what became of a rail since a lane was made on it.
func (r *rail) changed(was, is *standing) error {
	if !is.up {
		return fmt.Errorf("%s is down: %s", r.found.name(), is.why)
	}
	return fmt.Errorf("%s changed its address from %x to %x", r.found.name(), was.gid.Addr, is.gid.Addr)
}

// railChanged is told by the transport that follows the rails' state.
func (l *link) railChanged(r *rail, was, is *standing) {
	own := infos(l.local)
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	l.rails.setOwn(l, own)
	var dead []*lane
	for _, x := range l.lanes {
		if x.rail == r && !x.at.same(is) {
			dead = append(dead, x)
		}
	}
	l.mu.Unlock()
	for _, x := range dead {
		x.fail(r.changed(was, is))
	}
	l.setup.Tell(encodeRails(own))
	l.setup.RailsChanged()
}
