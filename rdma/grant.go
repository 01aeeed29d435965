package rdma

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer"
)

// How long a lane may take for a request about a window. It stands behind what the lane sends itself.
const (
	bindPatience     = 500 * time.Millisecond
	withdrawPatience = 60 * time.Millisecond // then the lane is aborted
)

var (
	_ transfer.Granter = (*link)(nil)
	_ transfer.Puller  = (*link)(nil)
	_ transfer.Grant   = (*grant)(nil)
)

// grant is what one lease's writer may do: a window for each region on each lane.
type grant struct {
	link  *link
	lease transfer.LeaseID
	parts []grantPart

	mu    sync.Mutex
	ended bool
	lanes map[*lane][]*window // by part; nil for an empty one
	works map[*lane]*work     // the invalidations, since ended
}

type grantPart struct {
	reg       *registration
	addr, len uint64
}

// Fencing implements transfer.Granter.
func (l *link) Fencing() string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.Pulls() {
		return "by ending this end's own reads"
	}
	for x := range l.living() {
		if x.noWindows != nil {
			return fmt.Sprintf("by aborting all lanes: %s has no usable memory windows: %v", x.rail.name, x.noWindows)
		}
	}
	return "by invalidating the lease's memory windows"
}

// living gives the lanes that carry pieces or are about to. l.mu is held.
func (l *link) living() func(func(*lane) bool) {
	return func(yield func(*lane) bool) {
		for _, x := range l.lanes {
			if !x.isFailing() && !yield(x) {
				return
			}
		}
		for x := range l.joining {
			if !x.isFailing() && !yield(x) {
				return
			}
		}
	}
}

func (x *lane) isFailing() bool {
	select {
	case <-x.down:
		return true
	default:
		return false
	}
}

// Grant implements transfer.Granter.
func (l *link) Grant(lease transfer.LeaseID, parts []transfer.Part) (transfer.Grant, error) {
	g := &grant{link: l, lease: lease, lanes: make(map[*lane][]*window)}
	for _, p := range parts {
		if p.Region.Hostless() {
			g.release()
			return nil, fmt.Errorf("%w: no memory window can be bound to a device's memory, as region %d is", transfer.ErrRegion, p.Region.ID())
		}
		reg := l.t.hold(p.Region)
		if reg == nil {
			g.release()
			return nil, fmt.Errorf("%w: destination region %d is not registered", transfer.ErrRegion, p.Region.ID())
		}
		g.parts = append(g.parts, grantPart{reg, reg.base + p.First, p.End - p.First})
	}
	var lanes []*lane
	var err error
	l.mu.Lock()
	for x := range l.living() {
		lanes = append(lanes, x)
		err = errors.Join(err, x.noWindows)
	}
	if err == nil && !l.closed {
		l.grants[g] = struct{}{} // lanes that join later bind by themselves
	}
	l.mu.Unlock()
	if err != nil {
		g.release()
		return nil, err
	}
	works := make([]*work, 0, len(lanes))
	for _, x := range lanes {
		w, werr := g.bind(x)
		err = errors.Join(err, werr)
		if w != nil {
			works = append(works, w)
		}
	}
	late := time.NewTimer(bindPatience)
	defer late.Stop()
	for _, w := range works {
		select {
		case <-w.done: // not ok where the lane failed: it carries nothing then
		case <-late.C:
			g.Release()
			return nil, fmt.Errorf("bind memory windows of lease %d: not done within %v", lease, bindPatience)
		}
	}
	if err != nil {
		g.Release()
		return nil, err
	}
	return g, nil
}

// bind has the windows of the lease bound on one lane; without work where there is nothing to do.
func (g *grant) bind(x *lane) (*work, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return nil, nil
	}
	n := 0
	for _, p := range g.parts {
		if p.len > 0 {
			n++
		}
	}
	free, err := x.rail.windows.take(x.rail.pd, n, min(windowsMax, int(x.rail.attr.MaxMW)/2))
	if err != nil {
		return nil, err
	}
	windows := make([]*window, len(g.parts))
	w := &work{bind: true}
	for i, p := range g.parts {
		if p.len > 0 {
			p.reg.windows.Add(1)
			windows[i] = &window{free[len(w.windows)], p.reg, p.addr, p.len}
			w.windows = append(w.windows, windows[i])
		}
	}
	if n == 0 {
		return nil, nil
	}
	if !x.submit(w) {
		for _, v := range w.windows {
			err = errors.Join(err, x.rail.windows.give(v.Window))
			v.reg.windows.Done()
		}
		return nil, err
	}
	g.lanes[x] = windows
	return w, nil
}

// Keys implements transfer.Grant.
func (g *grant) Keys() [][]byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	keys := make([][]byte, len(g.parts))
	for i, p := range g.parts {
		k := windowsKey{part: uint16(i), base: p.reg.base}
		for x, windows := range g.lanes {
			if windows[i] != nil {
				k.lanes = append(k.lanes, laneKey{uint16(x.index), windows[i].RKey})
			}
		}
		keys[i] = k.encode()
	}
	return keys
}

// end has all windows invalidated.
func (g *grant) end() map[*lane]*work {
	g.link.mu.Lock()
	delete(g.link.grants, g)
	g.link.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return g.works
	}
	g.ended, g.works = true, make(map[*lane]*work)
	for x, windows := range g.lanes {
		w := &work{}
		for _, v := range windows {
			if v != nil {
				w.windows = append(w.windows, v)
			}
		}
		x.submit(w)
		g.works[x] = w
	}
	g.release()
	return g.works
}

// release lets go of the regions, but for windows that are bound to them.
func (g *grant) release() {
	for _, p := range g.parts {
		p.reg.windows.Done()
	}
	g.parts = nil
}

// Release implements transfer.Grant.
func (g *grant) Release() { g.end() }

// Withdraw implements transfer.Grant. A lane that does not answer is aborted.
func (g *grant) Withdraw() {
	works := g.end()
	patience := cmp.Or(g.link.t.cfg.withdraw, withdrawPatience)
	late := time.NewTimer(patience)
	defer late.Stop()
	soft := false
	for x, w := range works {
		select {
		case <-w.done:
		case <-late.C:
			late.Reset(0) // nor are the others waited for
			x.fail(fmt.Errorf("invalidate memory windows of lease %d: not done within %v", g.lease, patience))
			<-w.done
		}
		if !w.ok {
			<-x.drained
		}
		soft = soft || x.rail.soft
	}
	if !soft {
		return
	}
	if err := settleSoft(); err != nil {
		for x := range works {
			g.link.Abort(x.index, err)
		}
	}
}

// windowsKey is what a lease's writer needs for one region. Little-endian: version 2 (1), number of lanes (1), which of the
// lease's regions it is (2), the region's address (8), then for each lane its number (2), reserved (2), its window's key (4).
type windowsKey struct {
	part  uint16
	base  uint64
	lanes []laneKey
}

type laneKey struct {
	lane uint16
	rkey uint32
}

const windowsKeyVersion = 2

func (k *windowsKey) encode() []byte {
	le := binary.LittleEndian
	b := le.AppendUint16([]byte{windowsKeyVersion, byte(len(k.lanes))}, k.part)
	b = le.AppendUint64(b, k.base)
	for _, l := range k.lanes {
		b = le.AppendUint32(le.AppendUint32(b, uint32(l.lane)), l.rkey)
	}
	return b
}

const windowsKeyHead, windowsKeyLane = 12, 8

func isWindowsKey(b []byte) bool {
	return len(b) >= windowsKeyHead && b[0] == windowsKeyVersion && len(b) == windowsKeyHead+windowsKeyLane*int(b[1])
}

// parseWindowsKey gives the region's address and number, and one lane's key, 0 if it is not there.
func parseWindowsKey(b []byte, lane int) (base uint64, part uint16, rkey uint32) {
	le := binary.LittleEndian
	for at := windowsKeyHead; at < len(b); at += windowsKeyLane {
		if le.Uint32(b[at:]) == uint32(lane) {
			rkey = le.Uint32(b[at+4:])
		}
	}
	return le.Uint64(b[4:]), le.Uint16(b[2:]), rkey
}

// errNoWindow says that the other end gave a lease no window on this lane: the lane was failing there when the lease was
// bound, which is not known here yet, or the lease had ended there when the lane was made.
var errNoWindow = errors.New("no memory window")

// awaitNews waits for what explains that a lease has no window on a lane: its end, or the lane's.
func (x *lane) awaitNews(w *transfer.Write, cause error) error {
	t := time.NewTimer(peerPatience)
	defer t.Stop()
	select {
	case <-w.Stop():
		return transfer.ErrFenced
	case <-x.down:
	case <-t.C:
		x.fail(cause)
	}
	return errDown
}

// destination says where and by which key a piece is to be written over this lane.
func (x *lane) destination(w *transfer.Write) (base uint64, rkey uint32, err error) {
	if !isWindowsKey(w.Key) {
		return parseKey(w.Key, x.peer.rail)
	}
	base, part, rkey := parseWindowsKey(w.Key, x.index)
	if rkey == 0 {
		rkey = x.late[lateKey{uint64(w.Piece.Lease), part}]
	}
	if rkey == 0 {
		return 0, 0, fmt.Errorf("%w: lease %d, lane %d", errNoWindow, w.Piece.Lease, x.index)
	}
	return base, rkey, nil
}
