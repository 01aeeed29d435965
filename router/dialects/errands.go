package dialects

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/upstream"
)

const (
	// abortAgain is when an abort is said a second time: the first one may reach the engine ahead of the request, and is
	// forgotten there (sglang#28651).
	abortAgain = 2 * time.Second
	// abortWithin is how long an engine may take to answer one.
	abortWithin = 2 * time.Second
	// errandsMax bounds what is under way. What is over it is not done: the engines' own timeouts end it.
	errandsMax = 8192
	// seeThroughMax is how long a prefill that nobody wants any more may take.
	seeThroughMax = time.Minute
)

// Errands are what is left to do for attempts that are over. Safe for concurrent use.
type Errands struct {
	client *upstream.Client
	count  func(result string)

	running sync.WaitGroup
	ctx     context.Context // ended by Close
	hurry   context.CancelFunc

	mu      sync.Mutex // guards what follows
	pending int
	closed  bool
}

// NewErrands makes Errands. count, which may be nil, is told what became of each abort: told, failed, or dropped when there is
// too much to do.
func NewErrands(c *upstream.Client, count func(result string)) *Errands {
	if count == nil {
		count = func(string) {}
	}
	e := &Errands{client: c, count: count}
	e.ctx, e.hurry = context.WithCancel(context.Background())
	return e
}

// run runs f, unless there is too much to do. f is to return soon once ctx has ended.
func (e *Errands) run(f func(ctx context.Context)) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.pending >= errandsMax {
		return false
	}
	e.pending++
	e.running.Go(func() {
		defer func() {
			e.mu.Lock()
			e.pending--
			e.mu.Unlock()
		}()
		f(e.ctx)
	})
	return true
}

// Pending is how many errands are under way.
func (e *Errands) Pending() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pending
}

// Close has what is under way done at once, or left, and waits for it, for a few seconds at most.
func (e *Errands) Close() {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.hurry()
	e.running.Wait()
}

// abort tells the engine at t, now and once more in two seconds, that the request that it knows as rid is void. It does not
// wait.
func (e *Errands) abort(t upstream.Target, rid string) {
	if !e.run(func(ctx context.Context) {
		e.say(t, rid)
		timer := time.NewTimer(abortAgain)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done(): // at once rather than never
		}
		e.say(t, rid)
	}) {
		e.count("dropped")
	}
}

func (e *Errands) say(t upstream.Target, rid string) {
	ctx, cancel := context.WithTimeout(context.Background(), abortWithin)
	defer cancel()
	body := append(openai.AppendString([]byte(`{"rid":`), rid), '}')
	leg := e.client.Open(t, upstream.Request{Path: "/abort_request", Body: [][]byte{body}, Accept: "*/*", Patient: true})
	defer leg.Close()
	if status, _, err := whole(ctx, leg); err != nil || status != 200 {
		e.count("failed")
		return
	}
	e.count("told")
}

// whole waits for a leg's whole response that is no event stream. The leg is the caller's to close.
func whole(ctx context.Context, leg *upstream.Leg) (status int, body []byte, err error) {
	if leg.Inline() {
		return wholeInline(ctx, leg)
	}
	for {
		select {
		case <-ctx.Done():
			return 0, nil, context.Cause(ctx)
		case b, ok := <-leg.C:
			if !ok {
				return 0, nil, context.Canceled
			}
			if over, err := judgeWhole(b, &status, &body); over {
				return status, body, err
			}
		}
	}
}

func wholeInline(ctx context.Context, leg *upstream.Leg) (status int, body []byte, err error) {
	defer context.AfterFunc(ctx, func() { leg.Interrupt(true) })()
	for {
		b, ok := leg.Next(time.Now().Add(attendEvery))
		if ok {
			if over, err := judgeWhole(b, &status, &body); over {
				return status, body, err
			}
		} else if ctx.Err() != nil {
			return 0, nil, context.Cause(ctx)
		}
	}
}

// judgeWhole takes a batch; over tells that it was the last one.
func judgeWhole(b upstream.Batch, status *int, body *[]byte) (over bool, err error) {
	defer b.Release()
	switch {
	case b.Err == nil:
		return false, nil
	case b.Err != io.EOF:
		return true, b.Err
	case b.SSE:
		err = fmt.Errorf("an event stream where none was asked for")
	}
	*status, *body = b.Status, append([]byte(nil), b.Data...)
	return true, err
}
