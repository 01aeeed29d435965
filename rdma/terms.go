package rdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer"
)

// terms are what the ends of a lane tell each other when both queue pairs are ready. Little-endian:
//
//	offset size field
//	     0    4 magic "HRT1"
//	     4    4 n, number of windows, at most 65536
//	     8    8 address of the lists (pull.go), 0 where the sender has none
//	    16    4 key of the lists
//	    20    4 reserved, 0
//	    24 16*n windows of leases that were bound before the lane was set up: lease (8), which of its regions (2), reserved (2),
//	            key (4)
type terms struct {
	listAddr uint64
	listKey  uint32
	windows  []lateWindow
}

type lateKey struct {
	lease uint64
	part  uint16
}

type lateWindow struct {
	lateKey
	rkey uint32
}

const (
	termsHead       = 24
	termsWindow     = 16
	termsWindowsMax = 65536
)

func (m *terms) encode() []byte {
	le := binary.LittleEndian
	b := append(make([]byte, 0, termsHead+termsWindow*len(m.windows)), "HRT1"...)
	b = le.AppendUint32(b, uint32(len(m.windows)))
	b = le.AppendUint64(b, m.listAddr)
	b = le.AppendUint32(le.AppendUint32(b, m.listKey), 0)
	for _, w := range m.windows {
		b = le.AppendUint64(b, w.lease)
		b = le.AppendUint32(le.AppendUint32(b, uint32(w.part)), w.rkey)
	}
	return b
}

// parseTermsHead gives the terms without windows, and how many bytes of windows follow.
func parseTermsHead(b []byte) (m terms, more int, err error) {
	le := binary.LittleEndian
	if len(b) != termsHead || string(b[:4]) != "HRT1" || le.Uint32(b[4:]) > termsWindowsMax || le.Uint32(b[20:]) != 0 {
		return m, 0, fmt.Errorf("%w: terms of a lane begin with %x", transfer.ErrProtocol, b)
	}
	return terms{listAddr: le.Uint64(b[8:]), listKey: le.Uint32(b[16:])}, termsWindow * int(le.Uint32(b[4:])), nil
}

func (m *terms) parseWindows(b []byte) error {
	le := binary.LittleEndian
	for ; len(b) >= termsWindow; b = b[termsWindow:] {
		if le.Uint16(b[10:]) != 0 {
			return fmt.Errorf("%w: a window of a lane's terms reads %x", transfer.ErrProtocol, b[:termsWindow])
		}
		m.windows = append(m.windows, lateWindow{lateKey{le.Uint64(b), le.Uint16(b[8:])}, le.Uint32(b[12:])})
	}
	if len(b) != 0 {
		return fmt.Errorf("%w: %d bytes behind a lane's terms", transfer.ErrProtocol, len(b))
	}
	return nil
}

// agree exchanges terms. The leases that were granted windows before get theirs on this lane; those that come later know it.
func (x *lane) agree(deadline time.Time) error {
	windows, err := x.bindLate(deadline)
	if err != nil {
		return err
	}
	if len(windows) > termsWindowsMax {
		return fmt.Errorf("%w: %d windows of living leases, at most %d on a lane that is dialled again", transfer.ErrLimit, len(windows), termsWindowsMax)
	}
	own := terms{windows: windows}
	if err := x.makeLists(&own); err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() {
		_, err := x.conn.Write(own.encode())
		sent <- err
	}()
	theirs, err := x.readTerms()
	if err != nil {
		x.conn.Close()
	}
	if err = errors.Join(err, <-sent); err != nil {
		return fmt.Errorf("exchange terms: %w", err)
	}
	if x.pulls() && theirs.listAddr == 0 {
		return fmt.Errorf("%w: the other end has no lists to offer pieces in", transfer.ErrProtocol)
	}
	x.link.pulled.Store(x.peer.pulls)
	x.peerLists.addr, x.peerLists.rkey = theirs.listAddr, theirs.listKey
	x.late = make(map[lateKey]uint32, len(theirs.windows))
	for _, w := range theirs.windows {
		x.late[w.lateKey] = w.rkey
	}
	return nil
}

func (x *lane) readTerms() (m terms, err error) {
	head := make([]byte, termsHead)
	if _, err = readFull(x.conn, head); err != nil {
		return m, err
	}
	m, more, err := parseTermsHead(head)
	if err != nil {
		return m, err
	}
	b := make([]byte, more)
	if _, err = readFull(x.conn, b); err != nil {
		return m, err
	}
	return m, m.parseWindows(b)
}

// bindLate binds windows for leases that were granted some on other lanes. The lane's goroutine does not run yet.
func (x *lane) bindLate(deadline time.Time) (windows []lateWindow, err error) {
	var works []*work
	var grants []*grant
	for _, g := range x.link.admit(x) {
		if x.noWindows != nil {
			return nil, x.noWindows
		}
		w, err := g.bind(x)
		if err != nil {
			return nil, err
		}
		if w != nil {
			works, grants = append(works, w), append(grants, g)
		}
	}
	if err := x.finishWorks(works, deadline); err != nil {
		return nil, err
	}
	for _, g := range grants {
		g.mu.Lock()
		for i, v := range g.lanes[x] {
			if v != nil && !g.ended {
				windows = append(windows, lateWindow{lateKey{uint64(g.lease), uint16(i)}, v.RKey})
			}
		}
		g.mu.Unlock()
	}
	return windows, nil
}

// admit makes a lane known to those who grant windows, and gives the grants that do not know of it.
func (l *link) admit(x *lane) (grants []*grant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.joining[x] = struct{}{}
	for g := range l.grants {
		grants = append(grants, g)
	}
	return grants
}

// dismiss forgets a lane that could not be set up.
func (l *link) dismiss(x *lane) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.joining, x)
}

// finishWorks takes completions until the work is done.
func (x *lane) finishWorks(works []*work, deadline time.Time) (err error) {
	wcs := make([]cgo.WC, pollBatch)
	if len(works) == 0 {
		return nil
	}
	defer func() { err = errors.Join(err, x.parked.SetReadDeadline(time.Time{})) }()
	for _, w := range works {
		for !isClosed(w.done) {
			if x.isFailing() {
				return errDown
			}
			if time.Now().After(deadline) {
				return errors.New("memory windows of living leases were not bound in time")
			}
			if err := x.parked.SetReadDeadline(deadline); err != nil {
				return err
			}
			n, err := x.poll(wcs)
			for i := range wcs[:n] {
				err = errors.Join(err, x.handle(&wcs[i]))
			}
			if err = errors.Join(err, x.endWorks()); err != nil {
				return err
			}
		}
	}
	return nil
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
