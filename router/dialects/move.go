package dialects

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

const (
	// moveWithin is how long a stream's KV cache may take to another worker, the wait for blocks there included. Until then, and if
	// it is not enough, the stream goes on where it is.
	moveWithin = 10 * time.Second
	// moveGrace is how much longer the worker may take to say so.
	moveGrace = 2 * time.Second
)

// MoveResult is what came of a move that was begun, in a word for metrics.
type MoveResult string

// Results of moves.
const (
	MoveDone     MoveResult = "moved"
	MoveRefused  MoveResult = "refused"  // one of the two could not begin: the stream stays
	MoveFailed   MoveResult = "failed"   // it was begun and came to nothing: the stream stays
	MoveOutlived MoveResult = "outlived" // the stream ended first, well or not
	// MoveNotOffered: the worker knows of no moves.
	MoveNotOffered MoveResult = "not_offered"
)

// Mover has streams of our own workers leave one that drains, for another. The router has one for each request. It is called by the
// goroutine that runs the attempt.
type Mover interface {
	// Heir is who shall go on with a stream that from serves, nil for nobody now: then again is closed when it may be somebody.
	// Whoever is named is taken until Moved is told what came of it.
	Heir(from *pairing.Worker) (to *pairing.Worker, again <-chan struct{})
	Moved(m Moved)
}

// Moved is a move that is over.
type Moved struct {
	From, To *pairing.Worker
	Result   MoveResult
	Err      error // why it came to nothing
	Ticket   [16]byte
	Tokens   int // of the answer, when it was begun
	Began    time.Time
	// Pause is the time from the hand-off until the other one had the stream; 0 where it did not get it.
	Pause time.Duration
}

// move is a stream's way from one worker to another. The source is told to play prefill at the place where the stream is, the heir
// is asked for the rest of the answer as decode is. Up to the hand-off the client gets the source's events; behind it the two are
// what the legs of a pair are to each other.
type move struct {
	from, to *leg
	ticket   []byte
	peer     string
	tokens   int
	queue    []upstream.Batch // of the heir
	settled  bool             // the heir has said that it has everything
	late     *time.Timer
	asked    bool
	told     chan error    // what the source answers
	gone     chan struct{} // closed when nothing is left of asking it
	cancel   context.CancelFunc
	handed   time.Time // zero before the hand-off
	about    Moved
}

// errNotOffered is of a worker that does not know how to move.
var errNotOffered = errors.New("it does not know how to move a stream")

// errWillNot is of one that knows how, and cannot.
var errWillNot = errors.New("it does not begin")

// serving is the leg that makes the client's tokens.
func (t *attempt) serving() *leg {
	if t.handedOff && t.decode != nil {
		return t.decode
	}
	return t.first
}

// movable tells whether the stream may begin to move: it decodes, and nothing is wrong with it.
func (t *attempt) movable() bool {
	l := t.serving()
	return t.move == nil && t.orphan == nil && t.doomed == nil && t.lost == nil && len(t.Progress.Given) > 0 && !l.ended && l.role != openai.RolePrefill &&
		(t.decode == nil || t.handedOff && t.settled)
}

// consider asks whether the stream is to move, when that may have changed.
func (t *attempt) consider() {
	if t.Mover == nil || t.considered || !t.movable() {
		return
	}
	t.considered = true
	from := t.serving()
	to, again := t.Mover.Heir(from.worker)
	t.again = again
	if to != nil {
		t.beginMove(from, to)
	}
}

// beginMove asks the heir for the rest of the answer. The source hears of it when the heir has taken the request.
func (t *attempt) beginMove(from *leg, to *pairing.Worker) {
	now := time.Now()
	m := &move{from: from, peer: to.NodeData, tokens: len(t.Progress.Given)}
	m.about = Moved{From: from.worker, To: to, Tokens: m.tokens, Began: now}
	tk, nonce, err := mintTicket(t.native.Key, from.worker, to, earlier(t.Request.Deadline, now.Add(moveWithin)))
	if err != nil {
		m.about.Result, m.about.Err = MoveRefused, err
		t.Mover.Moved(m.about)
		t.considered = false
		return
	}
	m.ticket, m.about.Ticket = tk, nonce
	kv := t.params()
	kv.Ticket, kv.Resume = tk, slices.Clone(t.Progress.Given)
	m.to = t.native.open(t, to, openai.RoleDecode, kv)
	m.late = time.NewTimer(moveWithin + moveGrace)
	t.move = m
}

func earlier(a, b time.Time) time.Time {
	if !a.IsZero() && a.Before(b) {
		return a
	}
	return b
}

// heard brings what the heir says before it is its turn.
func (m *move) heard() <-chan upstream.Batch {
	if m == nil || !m.handed.IsZero() || m.to.ended || len(m.queue) >= batchesQueuedMax {
		return nil
	}
	return m.to.C
}

func (m *move) answer() <-chan error {
	if m == nil {
		return nil
	}
	return m.told
}

func (m *move) tooLate() <-chan time.Time {
	if m == nil || !m.handed.IsZero() {
		return nil
	}
	return m.late.C
}

// fromHeir takes what the heir says before the hand-off.
func (t *attempt) fromHeir(b upstream.Batch) {
	m := t.move
	l := m.to
	l.answered, l.ended = l.answered || b.Status != 0, b.Err != nil
	if b.Status != 0 && !b.SSE {
		err := fmt.Errorf("worker %s answers with status %d: %.200s", l.worker.ID, b.Status, b.Data)
		b.Release()
		t.stay(MoveRefused, err)
		return
	}
	m.queue = append(m.queue, b)
	failed, err := m.look(b.Data)
	switch {
	case m.settled: // it has everything: the source's hand-off is on its way
	case failed != nil:
		t.stay(MoveFailed, fmt.Errorf("worker %s says %q", l.worker.ID, failed))
	case err == nil && b.Err == io.EOF:
		err = fmt.Errorf("worker %s has ended its answer", l.worker.ID)
		fallthrough
	case err != nil || b.Err != nil:
		t.stay(MoveFailed, errors.Join(err, b.Err))
	case !m.asked && b.Status != 0:
		t.tell(m)
	}
}

// look finds out what the heir's events mean for the move.
func (m *move) look(data []byte) (failed []byte, err error) {
	for len(data) > 0 {
		ev, n, err := openai.NextEvent(data)
		if err != nil || n == 0 {
			return nil, err
		}
		data = data[n:]
		switch ev.Kind {
		case openai.EventFailed:
			return append([]byte{}, ev.Arg...), nil
		case openai.EventPrior:
			m.settled = true
		}
	}
	return nil, nil
}

// tell tells the source to move the stream.
func (t *attempt) tell(m *move) {
	m.asked = true
	m.told, m.gone = make(chan error, 1), make(chan struct{})
	ctx, cancel := context.WithTimeout(context.Background(), moveGrace)
	m.cancel = cancel
	params := openai.MoveParams{ID: t.Request.ID, Choice: t.Request.Choice, Ticket: m.ticket, Peer: m.peer, Tokens: m.tokens}
	leg := t.native.Client.Open(m.from.Target, upstream.Request{Path: openai.PathMove, RequestID: t.Request.RequestID, Body: [][]byte{params.AppendJSON(nil)}, Accept: "application/json", Patient: true})
	told, gone := m.told, m.gone
	go func() {
		defer close(gone)
		status, body, err := whole(ctx, leg)
		switch {
		case err != nil:
		case status == http.StatusNotFound || status == http.StatusMethodNotAllowed || status == http.StatusNotImplemented:
			err = errNotOffered
		case status != http.StatusAccepted:
			err = fmt.Errorf("%w: status %d: %.200s", errWillNot, status, body)
		}
		leg.Close()
		told <- err
	}()
}

// answered takes what the source says of being told.
func (t *attempt) answered(err error) {
	m := t.move
	m.told = nil
	switch {
	case err == nil || !m.handed.IsZero() || m.settled:
	case errors.Is(err, errNotOffered):
		t.stay(MoveNotOffered, fmt.Errorf("worker %s: %w", m.from.worker.ID, err))
	default: // if it moves for all that, it will find nobody
		t.stay(MoveRefused, fmt.Errorf("worker %s: %w", m.from.worker.ID, err))
	}
	if errors.Is(err, errNotOffered) || errors.Is(err, errWillNot) {
		t.orphan = nil // nothing of it was begun
	}
}

// close ends what the move has under way, but for the legs that the attempt has.
func (m *move) close() {
	m.late.Stop()
	for _, b := range m.queue {
		b.Release()
	}
	m.queue = nil
	if m.cancel != nil {
		m.cancel()
		<-m.gone // the errand's leg is closed
	}
}

// stay gives a move up. The source goes on: it has not stopped, or will hear from the daemons that the lease has ended, or has let go
// of the stream just now, in which case the heir's failure is the attempt's.
func (t *attempt) stay(result MoveResult, err error) {
	m := t.move
	t.move, t.considered = nil, false
	if m.asked {
		t.orphan = t.fail(m.to, "slow", fmt.Errorf("take the stream over from worker %s: %w", m.from.worker.ID, err))
	}
	if !m.handed.IsZero() {
		for _, b := range t.queue {
			b.Release()
		}
		t.queue, t.decode, t.handedOff, t.settled = nil, nil, false, false
	}
	m.to.dropped = true
	m.to.Close()
	m.close()
	m.about.Result, m.about.Err = result, err
	t.Mover.Moved(m.about)
}

// handOver makes source and heir the attempt's legs.
func (t *attempt) handOver() {
	m := t.move
	m.handed = time.Now()
	m.late.Stop()
	if t.decode != nil {
		t.first.Finish() // prefill, which has done its part
	}
	t.first, t.decode = m.from, m.to
	t.queue, m.queue = m.queue, nil
	t.handedOff, t.settled, t.grace, t.movedOn = true, false, nil, true
}

// arrived ends a move well: the heir has the stream.
func (t *attempt) arrived() {
	m := t.move
	t.move, t.considered, t.lost = nil, false, nil
	m.close()
	m.about.Result, m.about.Pause = MoveDone, time.Since(m.handed)
	t.Mover.Moved(m.about)
}

// endMove ends a move together with the attempt.
func (t *attempt) endMove() {
	m := t.move
	if m == nil {
		return
	}
	t.move = nil
	if m.handed.IsZero() {
		m.to.Close()
	}
	m.close()
	m.about.Result = MoveOutlived
	t.Mover.Moved(m.about)
}

// heardMove takes what a leg says of a move; ours tells that it meant that alone.
func (t *attempt) heardMove(l *leg, what news) (out *Outcome, ours bool) {
	m := t.move
	switch {
	case what == newsStays:
		t.heardStays(l)
		return nil, true
	case what == newsHandoff && l.role != openai.RolePrefill && m != nil && m.asked && l == m.from && m.handed.IsZero():
		t.handOver()
		return nil, true
	case what == newsHandoff && l.role != openai.RolePrefill && t.orphan != nil:
		return nil, true // it will say that it stays, or that it has settled all the same
	case what == newsSettled && t.orphan != nil && l == t.serving():
		return t.orphan, true
	case (what == newsSettled || what == newsLoaded || what == newsDecoding) && m != nil && !m.handed.IsZero():
		t.arrived()
	case what == newsFailed && m != nil && l == m.to && !m.from.ended && t.lost == nil:
		t.stay(MoveFailed, fmt.Errorf("worker %s says %q", l.worker.ID, t.splice.reason))
		return nil, true
	}
	return nil, false
}

// heardStays takes a source's word that it goes on.
func (t *attempt) heardStays(l *leg) {
	switch m := t.move; {
	case m != nil && l == m.from && !m.settled:
		t.stay(MoveFailed, fmt.Errorf("worker %s says %q", l.worker.ID, t.splice.reason))
		t.orphan = nil
	case t.handedOff && l == t.first: // the other has the stream, as the two daemons did not both hear
		l.dropped = true
		l.Close()
	case l == t.serving():
		t.orphan, t.considered = nil, false
	}
}
