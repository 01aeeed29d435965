package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/router/socket"
)

// batchesAhead is how far a leg reads ahead of its consumer; behind that TCP slows the worker down.
const batchesAhead = 4

// patientIdle is how long a connection to a foreign engine is kept: uvicorn closes idle ones after 5 s, and a request
// that is sent at that moment is lost.
const patientIdle = 3 * time.Second

// Request is a POST, or a Get without a body.
type Request struct {
	Get       bool
	Path      string
	RequestID string
	// Headers are further ones, by name and value.
	Headers [][2]string
	// Accept is what the answer may be; an event stream when it is empty.
	Accept string
	// Patient: the worker may say nothing for as long as it likes; whoever waits finds out by other means whether it lives.
	Patient bool
	// WholeBytesMax bounds a body that is no event stream; the EventBytesMax when it is 0.
	WholeBytesMax int
	// Body is sent piece by piece and must stay unchanged until the leg has ended.
	Body [][]byte
	// Now is the time, for an inline leg whose caller has just looked; zero: it looks itself.
	Now time.Time
	// Room is where an inline leg may lie; nil: anywhere.
	Room *Room
}

// Batch is what one read brought.
type Batch struct {
	// Status and RetryAfter are the response's, in every batch that came behind its header; 0 when there was none.
	Status     int
	RetryAfter time.Duration
	// Data holds whole events for an event stream, else (SSE false) the whole body. It is valid until Release.
	Data []byte
	SSE  bool
	// ContentType of a whole body.
	ContentType string
	// Err, in the last batch of a leg only, is io.EOF for a response that ended as it should, else an *Error.
	Err error

	buf *buffer
}

// Release hands the data's memory back.
func (b *Batch) Release() {
	if b.buf != nil {
		b.buf.free()
		b.buf, b.Data = nil, nil
	}
}

// Kept is the batch with data of its own, which need not be released.
func (b *Batch) Kept() Batch {
	k := *b
	k.buf, k.Data = nil, bytes.Clone(b.Data)
	return k
}

// Kind is the sort of a leg's failure.
type Kind string

// Kinds of failures.
const (
	KindRefused  Kind = "refused"  // no connection was had: nothing was sent
	KindSilent   Kind = "silent"   // nothing was heard for the silence timeout
	KindLost     Kind = "lost"     // the connection broke or ended early
	KindProtocol Kind = "protocol" // what came is no HTTP or too long
	KindClosed   Kind = "closed"   // Close was called
)

// Error is why a leg ended before its response did.
type Error struct {
	Kind Kind
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Leg is one request to one worker, and its response.
type Leg struct {
	Target Target
	// C brings the response. It is closed behind the batch with Err.
	C chan Batch

	client       *Client
	request      Request
	inline       *inline         // of a leg whose caller reads by itself; nil for one with a goroutine
	ctx          context.Context // ended by Close, or when a finishing leg takes too long; of an inline leg nil but while it dials
	cancel       context.CancelFunc
	older, newer *Leg // among the client's, guarded by its mu
	done         chan struct{}
	written      chan struct{} // closed when the body is not in use any more
	heard        atomic.Int64

	mu        sync.Mutex // guards what follows
	conn      net.Conn
	closed    bool
	finishing bool
	lingering bool // up to the first data
	timer     *time.Timer
}

// LastHeard is when the worker last sent anything, or when the leg was opened.
func (l *Leg) LastHeard() time.Time { return time.Unix(0, l.heard.Load()) }

// Close cancels the request by closing the connection, unless it has ended already. It returns when the leg's
// goroutine is gone and the request's body is no longer in use. Idempotent.
func (l *Leg) Close() {
	l.abort()
	if x := l.inline; x != nil {
		if !x.ended {
			x.end(l, Batch{Err: &Error{KindClosed, context.Canceled}})
		}
		return
	}
	l.drain()
	<-l.done
}

// Finish lets a response that needs no more attention end by itself, so that its connection can serve again; one that
// takes longer than the FinishTimeout is closed. It does not wait; the caller may not receive from C any more.
func (l *Leg) Finish() {
	if l.inline != nil {
		l.inline.finish(l)
		return
	}
	l.mu.Lock()
	if l.closed || l.finishing {
		l.mu.Unlock()
		l.drain() // the response may have ended with C full, and its goroutine waits for room for the last batch
		return
	}
	l.finishing = true
	l.timer = time.AfterFunc(l.client.cfg.FinishTimeout, l.abort)
	l.mu.Unlock()
	l.drain()
}

// Linger closes the leg once the worker has sent data, and after the FinishTimeout at the latest: there are workers that must
// have got so far with a request to let go of what another one holds for it. It returns when the request's body is no longer
// in use; the caller may not receive from C any more.
func (l *Leg) Linger() {
	if l.inline != nil {
		l.inline.linger(l)
		return
	}
	l.mu.Lock()
	l.lingering = true
	l.mu.Unlock()
	l.Finish()
	<-l.written // Finish's timer bounds it
}

func (l *Leg) drain() {
	for {
		select {
		case b, ok := <-l.C:
			if !ok {
				return
			}
			b.Release()
		default:
			return
		}
	}
}

func (l *Leg) abort() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.closed = true
	if l.cancel != nil {
		l.cancel()
	}
	if l.conn != nil {
		l.conn.Close()
	}
}

// hold makes cn the connection that abort closes; false when the leg was closed before.
func (l *Leg) hold(cn *conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.ctx != nil && l.ctx.Err() != nil {
		cn.Close()
		return false
	}
	l.conn = cn
	return true
}

// letGo ends abort's right to close the connection, and says whether it was used.
func (l *Leg) letGo() (closed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	closed = l.closed
	l.closed, l.conn = true, nil
	if l.timer != nil {
		l.timer.Stop()
	}
	return closed
}

// send passes a batch on; false when nobody wants it any more.
func (l *Leg) send(b Batch) bool {
	l.mu.Lock()
	finishing, enough := l.finishing, l.lingering && len(b.Data) > 0
	l.mu.Unlock()
	if finishing {
		if enough {
			l.abort()
		}
		b.Release()
		return true
	}
	select {
	case l.C <- b:
		return true
	case <-l.ctx.Done():
		b.Release()
		return false
	}
}

func (l *Leg) run() {
	defer l.client.wg.Done()
	last, cn, reusable := l.exchange()
	l.free()
	closed := l.letGo()
	if cn != nil {
		if reusable && !closed {
			cn.heard = nil
			l.client.put(l.Target.Addr, cn, time.Now())
		} else {
			cn.Close()
		}
	}
	l.client.remove(l)
	if closed && last.Err != io.EOF {
		last.Err = &Error{KindClosed, context.Canceled}
	}
	close(l.done)
	select { // whoever called Close or Finish does not receive any more
	case l.C <- last:
	case <-l.ctx.Done():
		last.Release()
	}
	l.cancel()
	close(l.C)
}

// free says that the body is not in use any more. Idempotent; the leg's goroutine alone calls it.
func (l *Leg) free() {
	select {
	case <-l.written:
	default:
		close(l.written)
	}
}

// exchange does the whole request, all but its last batch sent.
func (l *Leg) exchange() (last Batch, cn *conn, reusable bool) {
	fail := func(kind Kind, format string, err error) Batch {
		if kind == KindLost && timedOut(err) {
			kind = KindSilent
		}
		return Batch{Err: &Error{kind, fmt.Errorf(format, l.Target.ID, l.Target.Addr, err)}}
	}
	cn = l.client.take(l.Target.Addr, time.Now())
	if cn == nil {
		var err error
		if cn, err = l.client.dial(l.ctx, l.Target.Addr); err != nil {
			return fail(KindRefused, "dial worker %s at %s: %w", err), nil, false
		}
	}
	if !l.hold(cn) {
		return fail(KindClosed, "dial worker %s at %s: %w", context.Canceled), nil, false
	}
	cn.heard = func() { l.heard.Store(time.Now().UnixNano()) }
	cn.silence, cn.idleMax = l.client.cfg.SilenceTimeout, l.client.cfg.IdleTimeout
	if l.request.Patient {
		cn.silence, cn.idleMax = 0, min(cn.idleMax, patientIdle)
	}
	// A worker may answer before it has read the whole body (413), so a broken write is not the end.
	writeErr := l.write(cn)
	l.free()
	r := response{br: cn.br}
	if err := r.readHeader(); err != nil {
		if writeErr != nil && !timedOut(err) {
			err = writeErr
		}
		if errors.Is(err, errMalformed) {
			return fail(KindProtocol, "read response of worker %s at %s: %w", err), cn, false
		}
		return fail(KindLost, "read response of worker %s at %s: %w", err), cn, false
	}
	l.heard.Store(time.Now().UnixNano())
	last = l.pump(&r, fail)
	return last, cn, writeErr == nil && last.Err == io.EOF && r.keepAlive && cn.br.Buffered() == 0
}

// write sends header and body, all pieces in as few system calls as the kernel takes.
func (l *Leg) write(cn *conn) error {
	pieces := l.pieces(nil, nil)
	cn.writes = armed{}
	if err := cn.SetWriteDeadline(time.Now().Add(l.client.cfg.WriteTimeout)); err != nil {
		return err
	}
	_, err := socket.WriteBuffers(cn.Conn, &pieces)
	return err
}

// pieces appends the request as it is sent to list: its header, made in room, and its body.
func (l *Leg) pieces(list net.Buffers, room []byte) net.Buffers {
	return append(append(list, l.request.appendHeader(room, l.Target.Addr, l.bodyLen())), l.request.Body...)
}

func (l *Leg) bodyLen() int {
	n := 0
	for _, p := range l.request.Body {
		n += len(p)
	}
	return n
}

// pump passes the body on in batches and returns the last one.
func (l *Leg) pump(r *response, fail func(Kind, string, error) Batch) Batch {
	finish := func(buf *buffer, n int, kind Kind, err error) Batch {
		last := Batch{Err: io.EOF}
		if err != io.EOF {
			last = fail(kind, "read response of worker %s at %s: %w", err)
		}
		last.Status, last.RetryAfter, last.SSE = r.status, r.retryAfter, r.sse
		last.ContentType = r.contentType
		last.buf, last.Data = buf, buf.b[:n]
		return last
	}
	limit := l.client.cfg.EventBytesMax
	if !r.sse && l.request.WholeBytesMax > 0 {
		limit = l.request.WholeBytesMax
	}
	buf := newBuffer()
	if r.sse { // the header alone is news: the worker lives and took the request
		if !l.send(Batch{Status: r.status, SSE: true}) {
			return finish(buf, 0, KindClosed, context.Canceled)
		}
	}
	for {
		if len(buf.b) >= limit {
			return finish(buf, 0, KindProtocol, fmt.Errorf("more than %d bytes without an end", limit))
		}
		err := r.readMore(buf)
		whole := len(buf.b)
		if r.sse {
			whole = eventsEnd(buf.b)
		} else if err != nil && err != io.EOF {
			whole = 0
		}
		switch {
		case errors.Is(err, errMalformed):
			return finish(buf, whole, KindProtocol, err)
		case err != nil:
			return finish(buf, whole, KindLost, err)
		case !r.sse || whole == 0:
			continue
		}
		next := newBuffer()
		next.b = append(next.b, buf.b[whole:]...)
		if !l.send(Batch{Status: r.status, SSE: true, Data: buf.b[:whole], buf: buf}) {
			return finish(next, 0, KindClosed, context.Canceled)
		}
		buf = next
	}
}

// timedOut knows timeouts, those of connections mostly.
func timedOut(err error) bool {
	if err == nil || err == io.EOF {
		return false
	}
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}
