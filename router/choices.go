package router

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
)

// dispatchChoices serves a request for several answers as so many requests of one: each has its legs, its progress and
// its attempts, so that what fails one of them is no other's concern. The first goes ahead until it decodes: then its
// prompt is in the workers' prefix caches and the others' costs little.
func (q *request) dispatchChoices(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m := &merge{out: q.out}
	defer func() { q.out = m.out }()
	n := q.body.N
	results := make(chan error, n)
	var running sync.WaitGroup
	serve := func(c *request) { running.Go(func() { results <- c.serveChoice(ctx) }) }

	began := make(chan pairing.Decision, 1)
	q.decoding = func(d pairing.Decision) {
		select {
		case began <- d:
		default: // once is enough
		}
	}
	q.out = &choiceSink{m: m}
	serve(q)
	var rest []*request
	serveRest := func(d pairing.Decision) {
		for i := 1; i < n && len(rest) < n-1; i++ {
			rest = append(rest, q.sibling(i, &choiceSink{m, i}, d))
			serve(rest[i-1])
		}
	}
	var err error
	for done := 0; done < n && err == nil; {
		select {
		case d := <-began:
			serveRest(d)
		case err = <-results:
			if done++; err == nil && rest == nil { // the first ended before it decoded
				serveRest(q.decision)
			}
		}
	}
	if err != nil {
		cancel(err)
	}
	running.Wait()
	for _, c := range rest {
		c.enter(stateDone)
		q.tokens += len(c.progress.Given)
		q.times.add(&c.times)
		if c.usage.known {
			q.usage.Completion += c.usage.Completion
		}
		q.dispatches += c.dispatches
	}
	if err != nil {
		return err
	}
	return m.finish(q)
}

// serveChoice is dispatchAll in a goroutine of its own.
func (q *request) serveChoice(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			q.r.log.Error("panic in a choice", "id", q.id, "choice", q.dreq.Choice, "panic", p, "stack", stack())
			err = openai.Internal("The router broke on this request.")
		}
	}()
	return q.dispatchAll(ctx)
}

// sibling is the request for another answer.
func (q *request) sibling(i int, out sink, d pairing.Decision) *request {
	c := q.another(q.body, out)
	c.decision, c.firstText, c.dreq.Choice = d, true, i
	for _, w := range []*pairing.Worker{d.Prefill, d.Decode, d.Whole} {
		if w != nil {
			c.warm = append(c.warm, w.ID)
		}
	}
	q.r.metrics.phases[c.state].Inc()
	return c
}

// another is a request of the same client for the same prompt, beside this one. What it comes to is its own.
func (q *request) another(b *body.Body, out sink) *request {
	c := &request{r: q.r, id: q.id, endpoint: q.endpoint, label: q.label, body: b, start: q.start, deadline: q.deadline, rank: q.rank, key: q.key, dreq: q.dreq, out: out,
		waited: q.waited, session: q.session, prompt: q.prompt, trace: q.trace}
	c.dreq.Body = b
	c.refuser, c.unpaired = c.refuse, c.apart
	return c
}

// merge puts the streams of several choices into one.
type merge struct {
	mu    sync.Mutex
	out   sink
	usage openai.Usage
}

// finish ends the answer: the workers' usages were for a choice each.
func (m *merge) finish(q *request) error {
	h := openai.Head{Endpoint: q.endpoint, ID: q.id, Created: q.dreq.Created, Model: q.body.Model}
	raw := h.AppendUsage(nil, m.usage)
	ev, _, err := openai.NextEvent(raw)
	if err == nil {
		err = m.out.Event(dialects.KindUsage, ev.Raw, ev.Arg, 0)
	}
	if err == nil {
		err = m.out.finish()
	}
	if err != nil {
		return clientError(err)
	}
	return nil
}

// choiceSink is one choice's way to the client. It ends nothing: the merge does, when all choices have.
type choiceSink struct {
	m     *merge
	index int
}

var _ sink = (*choiceSink)(nil)

func (s *choiceSink) Phase(dialects.Phase)         {}
func (s *choiceSink) finish() error                { return nil }
func (s *choiceSink) refuse(*openai.Error, []byte) {}

func (s *choiceSink) Whole(string, []byte) error { return errNotStreamed }

func (s *choiceSink) begun() bool {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.m.out.begun()
}

func (s *choiceSink) Event(kind dialects.Kind, raw, data []byte, n int) error {
	if kind == dialects.KindUsage {
		c, err := openai.ParseChunk(data)
		if err == nil && c.Usage == nil {
			err = errors.New("none in it")
		}
		if err != nil {
			return fmt.Errorf("%w: usage: %w", errBadChunk, err)
		}
		s.m.mu.Lock()
		defer s.m.mu.Unlock()
		s.m.usage.Add(s.index, *c.Usage)
		return nil
	}
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.m.out.Event(kind, raw, data, n)
}

func (s *choiceSink) Flush() error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.m.out.Flush()
}
