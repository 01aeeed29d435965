package model

import "github.com/headrace/headrace/worker/kernel"

// attendTask is up to kernel.MaxQueries queries of one key head: neighbouring tokens of one head while a prompt is
// read, the heads that share the key head for a single token.
type attendTask struct {
	seq             *Seq
	keyHead         int
	query           int // offset in the batch's queries
	stride, n       int
	ctxFirst, ctxUp int // positions the first query sees, and how many more each next one
}

func (b *batch) planAttention(s *Seq, row int) {
	if len(s.Tokens) == 1 {
		for h := 0; h < b.Heads; {
			group := h / b.groupHeads
			n := min(kernel.MaxQueries, (group+1)*b.groupHeads-h)
			b.attend = append(b.attend, attendTask{s, group, row*b.qDim + h*b.HeadDim, b.HeadDim, n, s.Pos + 1, 0})
			h += n
		}
		return
	}
	// Late tokens see most and go first, so that no long task is left for the end.
	for t := (len(s.Tokens) - 1) / kernel.MaxQueries * kernel.MaxQueries; t >= 0; t -= kernel.MaxQueries {
		n := min(kernel.MaxQueries, len(s.Tokens)-t)
		for h := range b.Heads {
			b.attend = append(b.attend, attendTask{s, h / b.groupHeads, (row+t)*b.qDim + h*b.HeadDim, b.qDim, n, s.Pos + t + 1, 1})
		}
	}
}

// Few sequences with much behind them: whole heads would leave threads idle, so each is spread over all of them. Every
// part computes what the whole would have, bit for bit.
const (
	spreadContext  = 256 // positions from which on it pays
	spreadTasks    = 4   // whole heads a thread from which on it does not
	spreadScoreMin = 128 // positions of a part, at least
	spreadDims     = 32
)

// spread is the attention that is spread over threads, in parts of three steps.
type spread struct {
	tasks   []attendTask
	scoreAt []int // where a task's scores start
	invAt   []int // and the factors of its softmax
	score   []scorePart
	softmax []softmaxPart
	mix     []mixPart
}

type (
	scorePart   struct{ task, from, to int }
	softmaxPart struct{ task, query int }
	mixPart     struct{ task, dim, dims int }
)

// spreadAttention moves tasks from attend to spread where threads would lack work.
func (b *batch) spreadAttention() {
	threads := b.pool.Threads()
	if threads == 1 || len(b.attend) >= spreadTasks*threads {
		return
	}
	whole := b.attend[:0]
	s := &b.spread
	scores, invs := 0, 0
	for _, t := range b.attend {
		if t.ctxUp != 0 || t.ctxFirst < spreadContext {
			whole = append(whole, t)
			continue
		}
		n := len(s.tasks)
		s.tasks = append(s.tasks, t)
		s.scoreAt, s.invAt = append(s.scoreAt, scores), append(s.invAt, invs)
		scores += t.n * kernel.ScoreWidth(t.ctxFirst)
		invs += t.n
		blocks := max(spreadScoreMin, t.ctxFirst/(2*threads))/b.c.BlockTokens + 1
		for from := 0; from < t.ctxFirst; from += blocks * b.c.BlockTokens {
			s.score = append(s.score, scorePart{n, from, min(from+blocks*b.c.BlockTokens, t.ctxFirst)})
		}
		for q := range t.n {
			s.softmax = append(s.softmax, softmaxPart{n, q})
		}
		for dim := 0; dim < b.HeadDim; dim += spreadDims {
			s.mix = append(s.mix, mixPart{n, dim, min(spreadDims, b.HeadDim-dim)})
		}
	}
	b.attend = whole
	grow(&b.buf.scores, scores)
	grow(&b.buf.inv, invs)
}

func (b *batch) attention(l int) {
	ly, f := &b.layers[l], &b.buf
	pages := make([]kernel.Pages, len(b.c.Shards))
	for i := range pages {
		pages[i] = b.c.pages(&b.c.Shards[i], l)
	}
	b.pool.Run(len(b.attend)+len(b.spread.score), func(thread, task int) {
		if task >= len(b.attend) {
			b.scorePart(pages, task-len(b.attend))
			return
		}
		t := &b.attend[task]
		var ctx [kernel.MaxQueries]int
		for i := range t.n {
			ctx[i] = t.ctxFirst + i*t.ctxUp
		}
		p, head := b.pagesOf(pages, t)
		b.im.Attend(p, t.seq.Blocks, head, f.q[t.query:], t.stride, ctx[:t.n], f.att[t.query:], t.stride, &b.scratch[thread])
	})
	if s := &b.spread; len(s.tasks) > 0 {
		b.pool.Run(len(s.softmax), func(_, i int) { b.softmaxPart(s.softmax[i]) })
		b.pool.Run(len(s.mix), func(_, i int) { b.mixPart(pages, s.mix[i]) })
	}
	b.addProduct(&ly.o, b.outProj, f.att, b.qDim)
}

// pagesOf picks the shard that holds a task's key head, and where in its rows the head starts.
func (b *batch) pagesOf(pages []kernel.Pages, t *attendTask) (*kernel.Pages, int) {
	perShard := b.KVHeads / len(pages)
	return &pages[t.keyHead/perShard], t.keyHead % perShard * b.HeadDim
}

func (b *batch) scorePart(pages []kernel.Pages, i int) {
	part := b.spread.score[i]
	t := &b.spread.tasks[part.task]
	p, head := b.pagesOf(pages, t)
	b.im.Score(p, t.seq.Blocks, head, b.buf.q[t.query:], t.stride, t.n, part.from, part.to,
		b.buf.scores[b.spread.scoreAt[part.task]:], kernel.ScoreWidth(t.ctxFirst))
}

func (b *batch) softmaxPart(part softmaxPart) {
	t := &b.spread.tasks[part.task]
	width := kernel.ScoreWidth(t.ctxFirst)
	at := b.spread.scoreAt[part.task] + part.query*width
	b.buf.inv[b.spread.invAt[part.task]+part.query] = b.im.Softmax(b.buf.scores[at:at+width], t.ctxFirst)
}

func (b *batch) mixPart(pages []kernel.Pages, part mixPart) {
	t := &b.spread.tasks[part.task]
	p, head := b.pagesOf(pages, t)
	inv := b.buf.inv[b.spread.invAt[part.task]:][:t.n]
	b.im.Mix(p, t.seq.Blocks, head+part.dim, part.dims, b.buf.scores[b.spread.scoreAt[part.task]:],
		kernel.ScoreWidth(t.ctxFirst), t.ctxFirst, inv, b.buf.att[t.query+part.dim:], t.stride)
}
