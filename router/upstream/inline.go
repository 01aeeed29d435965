package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/router/socket"
)

// inline is what a leg has whose caller reads by itself: no goroutine stands between the worker and the client.
type inline struct {
	Leg
	cn       *conn
	r        response
	buf      *buffer
	given    int         // of buf: what the caller has had
	small    []byte      // what is still to be sent of a request that was put into one piece
	unsent   net.Buffers // and of another one
	room     [6][]byte   // for them
	writeBy  time.Time
	writeErr error
	sent     atomic.Bool // all of the request, or all that the worker takes
	headed   atomic.Bool // the response's header is here
	ended    bool
	// interrupted is true from Interrupt on until Next has returned for it.
	interrupted atomic.Bool
	left        bool      // to a goroutine, which sees it to its end
	at          time.Time // when the worker last sent anything, or the leg was opened; the reader's
}

// Room is what an inline leg takes of memory, for one after the other. The zero value is ready to use.
type Room struct{ x inline }

// Free tells whether the leg that has the room, if one has, has ended and left nobody behind who knows it. Its user alone may ask.
func (r *Room) Free() bool { return r.x.client == nil || !r.x.left && r.x.ended }

// heardAt notes when the worker sent something.
func (x *inline) heardAt(now time.Time) {
	x.at = now
	x.heard.Store(now.UnixNano())
}

// HeardAt is LastHeard of an inline leg, for its reader.
func (l *Leg) HeardAt() time.Time { return l.inline.at }

// smallBytes is how long a request may be to be copied into one piece, which costs less than a list of pieces does.
const smallBytes = 4 << 10

// yieldBytesMax is how long the request may be of somebody who lets others go first before reading. Behind long ones there are
// others like it, mostly, each of which takes the processor for half a millisecond where prompts are told exactly.
const yieldBytesMax = 64 << 10

// OpenInline is Open for a caller that takes the answer with Next, in one goroutine. Nothing is sent before. The request is
// a patient one: silence is no failure.
func (c *Client) OpenInline(t Target, r Request) *Leg {
	var x *inline
	if r.Room != nil && r.Room.Free() { // else somebody still sees the last one to its end
		x = &r.Room.x
		*x = inline{}
	} else {
		x = &inline{}
	}
	l := &x.Leg
	l.Target, l.inline, l.client, l.request = t, x, c, r
	l.request.Patient, l.request.Room = true, nil
	if r.Now.IsZero() {
		r.Now = time.Now()
	}
	x.heardAt(r.Now)
	if !c.add(l) {
		l.abort()
	}
	return l
}

// Inline tells whether the leg's answer is taken with Next.
func (l *Leg) Inline() bool { return l.inline != nil }

// Abort makes a Next that waits, and all that follow, fail. It may be called from any goroutine, at any time.
func (l *Leg) Abort() { l.abort() }

// Headed tells whether an inline leg's response has begun. It may be called from any goroutine, as Sent.
func (l *Leg) Headed() bool { return l.inline != nil && l.inline.headed.Load() }

// Sent tells whether an inline leg's request body is not in use any more.
func (l *Leg) Sent() bool { return l.inline != nil && l.inline.sent.Load() }

// Interrupt makes a Next that waits return with nothing, or the following one where none does. With all, a connection that is
// being made is given up, which ends the leg, and a worker that does not take the request is not waited for; without, Next
// waits for these as it would. It may be called from any goroutine, at any time.
func (l *Leg) Interrupt(all bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inline.interrupted.Store(true)
	switch {
	case l.conn != nil && all:
		_ = l.conn.SetDeadline(time.Unix(1, 0))
	case l.conn != nil:
		_ = l.conn.SetReadDeadline(time.Unix(1, 0))
	case all && l.cancel != nil:
		l.cancel()
	}
}

// stopped tells whether Next is to return because of Interrupt, or because a deadline has come. The connection's are not known then.
func (x *inline) stopped() bool {
	x.cn.reads, x.cn.writes = armed{}, armed{}
	return x.interrupted.Swap(false)
}

// await sets the deadline of what is read; false when Next is to return at once.
func (x *inline) await(l *Leg, until time.Time) (bool, error) {
	if !x.cn.reads.holds(until) {
		l.mu.Lock() // Interrupt's deadline comes behind this one, or is seen here
		defer l.mu.Unlock()
		if !x.interrupted.Load() {
			x.cn.reads.at = until
			return true, x.cn.SetReadDeadline(until)
		}
	}
	return !x.interrupted.Load() || !x.stopped(), nil
}

// Next waits until that time for what one read brings; false when nothing came. The batch's data is good until the next
// call. Behind a batch with Err there is none.
func (l *Leg) Next(until time.Time) (Batch, bool) {
	x := l.inline
	if x.cn == nil {
		if last, ok := x.begin(l); !ok {
			return x.end(l, last), true
		}
	}
	if len(x.small)+len(x.unsent) > 0 && x.write(until) {
		return Batch{}, false
	}
	if ok, err := x.await(l, until); err != nil {
		return x.end(l, l.failed(KindLost, err)), true
	} else if !ok {
		return Batch{}, false
	}
	if !x.headed.Load() {
		switch err := x.r.readHeader(); {
		case timedOut(err):
			x.stopped()
			return Batch{}, false
		case errors.Is(err, errMalformed):
			return x.end(l, l.failed(KindProtocol, err)), true
		case err != nil:
			if x.writeErr != nil {
				err = x.writeErr
			}
			return x.end(l, l.failed(KindLost, err)), true
		}
		x.headed.Store(true)
		x.heardAt(time.Now())
		return x.more(l, true)
	}
	return x.more(l, false)
}

// failed is the batch of a leg that broke.
func (l *Leg) failed(kind Kind, err error) Batch {
	what := "read response of"
	if kind == KindRefused || kind == KindClosed {
		what = "dial"
	}
	return Batch{Err: &Error{kind, fmt.Errorf("%s worker %s at %s: %w", what, l.Target.ID, l.Target.Addr, err)}}
}

// begin connects and makes the request ready to be sent.
func (x *inline) begin(l *Leg) (last Batch, ok bool) {
	now := x.at // nothing was waited for
	cn := l.client.take(l.Target.Addr, now)
	if cn == nil {
		var err error
		if cn, err = x.dial(l); err != nil {
			return l.failed(KindRefused, err), false
		}
	}
	if !l.hold(cn) {
		return l.failed(KindClosed, context.Canceled), false
	}
	x.cn, x.buf = cn, newBuffer()
	cn.byCaller, cn.idleMax = true, min(l.client.cfg.IdleTimeout, patientIdle)
	x.r.br = cn.br
	x.writeBy = now.Add(l.client.cfg.WriteTimeout)
	n := l.bodyLen()
	cn.head = cn.appendHeader(&l.request, l.Target.Addr, n)
	total := len(cn.head) + n
	if cn.yields = total <= yieldBytesMax; total <= smallBytes {
		for _, p := range l.request.Body {
			cn.head = append(cn.head, p...)
		}
		x.small = cn.head
		return Batch{}, true
	}
	x.unsent = append(append(x.room[:0], cn.head), l.request.Body...)
	return Batch{}, true
}

// dial connects, until the leg is closed.
func (x *inline) dial(l *Leg) (*conn, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	l.mu.Lock()
	closed := l.closed
	l.cancel = cancel
	l.mu.Unlock()
	if closed {
		return nil, context.Canceled
	}
	return l.client.dial(ctx, l.Target.Addr)
}

// write sends what is still to be sent of the request; more says that the worker did not take all of it until then, and has
// time left to. A write that breaks is not the end: a worker may answer before it has read the whole body.
func (x *inline) write(until time.Time) (more bool) {
	if until.After(x.writeBy) {
		until = x.writeBy
	}
	err := x.cn.writes.set(until, x.cn.SetWriteDeadline)
	if err == nil && len(x.small) > 0 {
		var n int
		n, err = x.cn.Conn.Write(x.small)
		x.small = x.small[n:]
	}
	if err == nil {
		_, err = socket.WriteBuffers(x.cn.Conn, &x.unsent)
	}
	if timedOut(err) {
		if x.stopped(); time.Now().Before(x.writeBy) {
			return true
		}
	}
	x.small, x.unsent, x.writeErr = nil, nil, err
	x.sent.Store(true)
	return false
}

// more reads the body: what one read brings of events, or all of it. fresh says that x.at is the time.
func (x *inline) more(l *Leg, fresh bool) (Batch, bool) {
	limit := l.client.cfg.EventBytesMax
	if !x.r.sse && l.request.WholeBytesMax > 0 {
		limit = l.request.WholeBytesMax
	}
	if x.given > 0 {
		x.buf.b = append(x.buf.b[:0], x.buf.b[x.given:]...)
		x.given = 0
	}
	for {
		if len(x.buf.b) >= limit {
			return x.end(l, l.failed(KindProtocol, fmt.Errorf("more than %d bytes without an end", limit))), true
		}
		before, here := len(x.buf.b), x.cn.br.Buffered() > 0
		err := x.r.readMore(x.buf)
		if len(x.buf.b) > before && !(fresh && here) {
			x.heardAt(time.Now())
		}
		whole := len(x.buf.b)
		if x.r.sse {
			whole = eventsEnd(x.buf.b)
		} else if err != io.EOF {
			whole = 0
		}
		b := Batch{Status: x.r.status, RetryAfter: x.r.retryAfter, SSE: x.r.sse, ContentType: x.r.contentType, Data: x.buf.b[:whole]}
		x.given = whole
		switch {
		case err == io.EOF:
			b.Err = io.EOF
			return x.end(l, b), true
		case errors.Is(err, errMalformed):
			b.Err = l.failed(KindProtocol, err).Err
			return x.end(l, b), true
		case timedOut(err):
			x.stopped()
			return b, whole > 0
		case err != nil:
			b.Err = l.failed(KindLost, err).Err
			return x.end(l, b), true
		case x.r.sse && whole > 0:
			return b, true
		}
	}
}

// finish ends a leg whose answer the caller has. What is still to come of the response mostly has come already.
func (x *inline) finish(l *Leg) {
	if x.left || x.ended {
		return
	}
	if !x.headed.Load() || !x.sent.Load() {
		l.Close()
		return
	}
	until := time.Now().Add(l.client.cfg.FinishTimeout)
	if x.r.here() {
		x.drain(l, until)
		return
	}
	x.left = true
	go x.drain(l, until)
}

// Ready tells whether the worker has sent something that an inline leg has not read yet. The goroutine that calls Next may ask.
func (l *Leg) Ready() bool {
	x := l.inline
	return x.cn != nil && !x.ended && x.sent.Load() && (x.cn.br.Buffered() > 0 || x.cn.readable())
}

func (x *inline) drain(l *Leg, until time.Time) {
	for !x.over(l, until) {
	}
}

// Drain is Finish of an inline leg for somebody who can wait, whatever the leg has come to.
func (l *Leg) Drain() {
	if !l.inline.ended {
		l.inline.drain(l, time.Now().Add(l.client.cfg.FinishTimeout))
	}
}

// linger sends what is still to be sent, and closes the leg once there is data.
func (x *inline) linger(l *Leg) {
	until := time.Now().Add(l.client.cfg.FinishTimeout)
	soon := func() time.Time { return time.Now().Add(lingerLook) }
	for !x.ended && !x.sent.Load() {
		b, ok := l.Next(soon())
		if done := ok && (b.Err != nil || len(b.Data) > 0); done || !time.Now().Before(until) {
			b.Release()
			l.Close()
			return
		}
	}
	if x.ended {
		return
	}
	x.left = true
	go func() {
		for {
			b, ok := l.Next(until)
			if ok && (b.Err != nil || len(b.Data) > 0) || !ok && !time.Now().Before(until) {
				b.Release()
				l.Close()
				return
			}
		}
	}()
}

// lingerLook is how often a leg that lingers looks whether its request is sent.
const lingerLook = time.Millisecond

// over takes more of an answer that nobody needs; true when that was all, or is all that the leg has time for.
func (x *inline) over(l *Leg, until time.Time) bool {
	b, ok := l.Next(until)
	if ok && b.Err == nil || !ok && time.Now().Before(until) {
		return false
	}
	b.Release()
	l.Close()
	return true
}

// end closes the books, and gives last with what is true of it now. Idempotent.
func (x *inline) end(l *Leg, last Batch) Batch {
	if x.ended {
		return last
	}
	x.ended = true
	closed := l.letGo()
	if closed && last.Err != io.EOF {
		last.Err = &Error{KindClosed, context.Canceled}
	}
	if cn := x.cn; cn != nil {
		cn.byCaller = false
		if x.interrupted.Load() {
			cn.reads, cn.writes = armed{}, armed{}
		}
		if last.Err == io.EOF && !closed && x.writeErr == nil && x.r.keepAlive && cn.br.Buffered() == 0 {
			l.client.put(l.Target.Addr, cn, x.at)
		} else {
			cn.Close()
		}
	}
	if x.buf != nil {
		last.buf = x.buf // for Release
		if last.Data == nil {
			last.Release()
		}
		x.buf = nil
	}
	l.client.remove(l)
	l.client.wg.Done()
	return last
}
