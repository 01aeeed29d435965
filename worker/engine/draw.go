package engine

import (
	"sync"
	"sync/atomic"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/sample"
)

// drawn is what a step gave a sequence.
type drawn struct {
	token   int32
	logprob *openai.Logprob
}

// draw samples the next token of every sequence of a step that has logits, and takes the log probabilities that are
// asked for. Over a large vocabulary that takes a while, so the sequences share the cores; each draw is a pure function,
// so that changes nothing.
func (e *Engine) draw(batch []work) []drawn {
	next := make([]drawn, len(batch))
	var jobs []func(*sample.Sampler)
	for i, w := range batch {
		s, last := w.seq, e.seqs[w.last]
		if s.scoring() {
			jobs = append(jobs, e.score(w)...)
		}
		if !last.Logits || s.computed+w.n < len(s.tokens) || s.req.MaxTokens == 0 {
			continue
		}
		jobs = append(jobs, func(sampler *sample.Sampler) {
			params := sample.Params(s.req.Sampling)
			next[i].token = sampler.Sample(last.Out, &params, s.place())
			if s.req.Logprobs {
				lp := logprobOf(sampler, last.Out, next[i].token, s.req.TopLogprobs)
				next[i].logprob = &lp
			}
		})
	}
	e.share(jobs)
	return next
}

// shareLeast is how many logits make it worth waking other cores.
const shareLeast = 1 << 15

// share runs jobs on all cores.
func (e *Engine) share(jobs []func(*sample.Sampler)) {
	if len(jobs) < 2 || len(jobs)*e.cfg.Vocab < shareLeast {
		for _, job := range jobs {
			job(&e.samplers[0])
		}
		return
	}
	var next atomic.Int64
	var running sync.WaitGroup
	for i := range min(len(jobs), len(e.samplers)) {
		running.Go(func() {
			for at := int(next.Add(1)) - 1; at < len(jobs); at = int(next.Add(1)) - 1 {
				jobs[at](&e.samplers[i])
			}
		})
	}
	running.Wait()
}

// score makes the jobs that find the log probabilities of the tokens behind a chunk's.
func (e *Engine) score(w work) []func(*sample.Sampler) {
	s := w.seq
	if s.computed == 0 {
		s.scores = append(s.scores[:0], openai.Logprob{TokenLogprob: openai.TokenLogprob{Token: s.tokens[0]}, Unknown: true})
	}
	from := len(s.scores) // the token that the chunk's first logits are about
	n := min(w.n, s.prompt()-from)
	s.scores = append(s.scores, make([]openai.Logprob, n)...)
	jobs := make([]func(*sample.Sampler), n)
	for k := range n {
		jobs[k] = func(sampler *sample.Sampler) {
			s.scores[from+k] = logprobOf(sampler, e.seqs[w.first+k].Out, s.tokens[from+k], s.req.TopLogprobs)
		}
	}
	return jobs
}

func logprobOf(s *sample.Sampler, logits []float32, token int32, top int) openai.Logprob {
	l := s.Logprobs(logits, token, top)
	out := openai.Logprob{TokenLogprob: openai.TokenLogprob(l.Logprob), Top: make([]openai.TokenLogprob, len(l.Top))}
	for i, t := range l.Top {
		out.Top[i] = openai.TokenLogprob(t)
	}
	return out
}

// sampled takes a sequence on by a token.
func (e *Engine) sampled(s *seq, next drawn) {
	if s.scoring() {
		s.emit(api.TokenEvent{Kind: api.EventPrompt, Prompt: s.scores})
		s.scores = nil
	}
	if s.req.MaxTokens == 0 {
		s.emit(api.TokenEvent{Kind: api.EventFinish, Finish: openai.FinishLength, CachedTokens: s.cached})
		e.end(s, "the request has ended")
		return
	}
	s.tokens = append(s.tokens, next.token)
	e.count.generation++
	ev := api.TokenEvent{Kind: api.EventToken, Token: next.token, Logprob: next.logprob, CachedTokens: s.cached}
	switch {
	case e.isEnd(s.req, next.token):
		ev.Finish = openai.FinishStop
	case s.generated() >= s.req.MaxTokens || len(s.tokens) >= e.cfg.Context:
		ev.Finish = openai.FinishLength
	}
	s.emit(ev)
	switch {
	case ev.Finish != "":
		e.end(s, "the request has ended")
	case s.isPrefillLeg():
		s.emit(api.TokenEvent{Kind: api.EventHandoff})
		e.handoff(s)
	}
}
