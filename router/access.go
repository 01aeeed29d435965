package router

import (
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/openai"
)

// accessBytesMax bounds what waits to be written: a disk or a reader that stands still costs lines, not requests.
const accessBytesMax = 1 << 20

// accessLog writes a line a request. Requests append to a buffer, one goroutine writes whatever has come up to then, so that
// lines are late by one write at most.
type accessLog struct {
	w       io.Writer
	json    bool
	dropped prometheus.Counter
	wake    chan struct{} // holds one
	done    chan struct{}

	mu     sync.Mutex // guards what follows
	buf    []byte
	closed bool
}

// newAccessLog returns nil when w is: nothing is written.
func newAccessLog(w io.Writer, json bool, dropped prometheus.Counter) *accessLog {
	if w == nil {
		return nil
	}
	a := &accessLog{w: w, json: json, dropped: dropped, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go a.run()
	return a
}

func (a *accessLog) run() {
	defer close(a.done)
	var out []byte
	for range a.wake {
		a.mu.Lock()
		out, a.buf = a.buf, out[:0]
		a.mu.Unlock()
		if len(out) > 0 {
			_, _ = a.w.Write(out) // there is nobody to tell but the log itself
		}
		if cap(out) > accessBytesMax/4 {
			out = nil
		}
	}
}

// close writes what is left.
func (a *accessLog) close() {
	if a == nil {
		return
	}
	a.mu.Lock()
	if !a.closed {
		a.closed = true
		close(a.wake)
	}
	a.mu.Unlock()
	<-a.done
	a.mu.Lock()
	out := a.buf
	a.buf = nil
	a.mu.Unlock()
	if len(out) > 0 {
		_, _ = a.w.Write(out)
	}
}

// line appends one by f.
func (a *accessLog) line(f func(*fields)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed || len(a.buf) > accessBytesMax {
		a.dropped.Inc()
		return
	}
	x := fields{b: a.buf, json: a.json}
	if x.json {
		x.b = append(x.b, '{')
	}
	f(&x)
	if x.json {
		x.b = append(x.b, '}')
	}
	a.buf = append(x.b, '\n')
	select {
	case a.wake <- struct{}{}:
	default: // it is awake
	}
}

// request tells of an ended request.
func (a *accessLog) request(r *record) {
	if a == nil {
		return
	}
	a.line(func(f *fields) {
		f.time("time", r.start)
		f.text("msg", "request")
		f.text("request_id", r.requestID)
		f.text("id", r.id)
		f.some("trace_id", r.traceID)
		f.some("key", r.key)
		f.text("endpoint", r.label)
		f.text("model", r.model)
		f.truth("stream", r.stream)
		f.int("code", r.code)
		f.text("outcome", r.outcome)
		f.some("phase", r.last)
		f.some("cause", r.cause)
		if r.usage.known {
			f.int("prompt_tokens", r.usage.Prompt)
			f.int("cached_tokens", r.usage.Cached)
			f.int("completion_tokens", r.usage.Completion)
		} else {
			f.int("completion_tokens", r.tokens)
		}
		f.millis("queue_ms", r.waited)
		if r.times.first > 0 {
			f.millis("ttft_ms", r.times.first)
		}
		f.millis("total_ms", r.took)
		f.int("attempts", r.dispatches)
		if all := r.all(); len(all) > 0 {
			x := &all[len(all)-1] // who served it, or was the last to try
			if x.whole != nil {
				f.text("dialect", x.whole.Dialect)
				f.text("worker", x.whole.ID)
			} else {
				f.text("dialect", x.decode.Dialect)
				f.text("prefill", x.prefill.ID)
				f.text("decode", x.decode.ID)
			}
		}
		f.some("err", r.message())
	})
}

// refused tells of a request that was answered without being accepted.
func (a *accessLog) refused(start time.Time, id, key, endpoint string, code int, e *openai.Error) {
	if a == nil {
		return
	}
	a.line(func(f *fields) {
		f.time("time", start)
		f.text("msg", "request")
		f.some("request_id", id)
		f.some("key", key)
		f.text("endpoint", endpoint)
		f.int("code", code)
		if e == nil {
			f.text("outcome", "ok")
		} else {
			f.text("outcome", "error")
		}
		f.millis("total_ms", time.Since(start))
		if e != nil {
			f.text("err", e.Message)
		}
	})
}

// fields builds a line: members of a JSON object, or logfmt.
type fields struct {
	b    []byte
	json bool
	more bool
}

func (f *fields) name(name string) {
	switch {
	case f.json && f.more:
		f.b = append(f.b, ',')
	case f.more:
		f.b = append(f.b, ' ')
	}
	f.more = true
	if f.json {
		f.b = append(append(append(f.b, '"'), name...), '"', ':')
		return
	}
	f.b = append(append(f.b, name...), '=')
}

func (f *fields) int(name string, n int) {
	f.name(name)
	f.b = strconv.AppendInt(f.b, int64(n), 10)
}

func (f *fields) truth(name string, v bool) {
	f.name(name)
	f.b = strconv.AppendBool(f.b, v)
}

func (f *fields) millis(name string, d time.Duration) {
	f.name(name)
	f.b = strconv.AppendFloat(f.b, millis(d), 'f', -1, 64)
}

func (f *fields) time(name string, t time.Time) {
	f.name(name)
	if f.json {
		f.b = append(f.b, '"')
	}
	f.b = t.UTC().AppendFormat(f.b, "2006-01-02T15:04:05.000Z")
	if f.json {
		f.b = append(f.b, '"')
	}
}

// some is text where there is any.
func (f *fields) some(name, s string) {
	if s != "" {
		f.text(name, s)
	}
}

func (f *fields) text(name, s string) {
	f.name(name)
	if f.json || !bare(s) { // a JSON string is a quoted logfmt value, too
		f.b = openai.AppendString(f.b, s)
		return
	}
	f.b = append(f.b, s...)
}

// bare tells whether logfmt needs no quotes around s.
func bare(s string) bool {
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c == '"' || c == '=' || c == '\\' || c >= 0x7f {
			return false
		}
	}
	return s != ""
}
