package model

import (
	"github.com/headrace/headrace/worker/kernel"
)

// buffers are the activations of a batch, a row a token. They grow to the largest batch seen.
type buffers struct {
	x, h, q, k, v, att, gate, up, sum []float32
	scores, inv                       []float32   // of attention that is spread over threads
	tmp                               [][]float32 // a thread
}

func grow(b *[]float32, n int) []float32 {
	if cap(*b) < n {
		*b = make([]float32, n)
	}
	*b = (*b)[:n]
	return *b
}

// place says which sequence and position a row of the batch is.
type place struct {
	seq *Seq
	pos int
}

// panel is a part of a product: rows [from,to) of matrix number m.
type panel struct{ m, from, to int }

// batch is one Forward: what stays the same from layer to layer.
type batch struct {
	*Model
	c                           *Cache
	rows                        []place
	attend                      []attendTask
	spread                      spread
	qkv, outProj, gateUp, downs []panel
}

// Forward computes the batch. onLayer, if given, is called on the caller's goroutine when a layer's keys and values
// of all sequences are in the cache, before the next layer begins. After an error nothing of the batch counts.
func (m *Model) Forward(c *Cache, seqs []*Seq, onLayer func(layer int)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.checkCache(c); err != nil {
		return err
	}
	rows := 0
	for i, s := range seqs {
		if err := m.checkSeq(c, i, s); err != nil {
			return err
		}
		rows += len(s.Tokens)
	}
	if rows == 0 {
		return nil
	}
	b := m.plan(c, seqs, rows)
	b.embedTokens()
	for l := range m.layers {
		b.project(l)
		b.store(l)
		if onLayer != nil {
			onLayer(l)
		}
		b.attention(l)
		b.feedForward(l)
	}
	b.logits(seqs)
	return nil
}

func (m *Model) plan(c *Cache, seqs []*Seq, rows int) *batch {
	b := &batch{Model: m, c: c, rows: make([]place, 0, rows)}
	last := 0
	for _, s := range seqs {
		b.planAttention(s, len(b.rows))
		for i := range s.Tokens {
			b.rows = append(b.rows, place{s, s.Pos + i})
		}
		last = max(last, s.Pos+len(s.Tokens))
	}
	b.spreadAttention()
	m.needRope(last)
	l := &m.layers[0]
	b.qkv = b.panels(&l.q, &l.k, &l.v)
	b.outProj = b.panels(&l.o)
	b.gateUp = b.panels(&l.gate)
	b.downs = b.panels(&l.down)
	f := &m.buf
	for _, g := range []struct {
		b *[]float32
		n int
	}{{&f.x, m.Dim}, {&f.h, m.Dim}, {&f.sum, m.Dim}, {&f.q, m.qDim}, {&f.att, m.qDim}, {&f.k, m.kvDim}, {&f.v, m.kvDim}, {&f.gate, m.FFN}, {&f.up, m.FFN}} {
		grow(g.b, rows*g.n)
	}
	return b
}

// panels cuts the rows of matrices into tasks.
func (b *batch) panels(ms ...*kernel.Matrix) []panel {
	var out []panel
	for i, m := range ms {
		n := m.PanelRows(len(b.rows), b.pool.Threads())
		for from := 0; from < m.Rows; from += n {
			out = append(out, panel{i, from, min(from+n, m.Rows)})
		}
	}
	return out
}

func (b *batch) embedTokens() {
	for r, p := range b.rows {
		b.embed.Row(b.buf.x[r*b.Dim:r*b.Dim], int(p.seq.Tokens[p.pos-p.seq.Pos]))
	}
}

// rowsPerTask keeps a task of row-wise work above the cost of handing it out.
const rowsPerTask = 8

// eachRow runs f for every row of the batch, on all threads when there are enough rows.
func (b *batch) eachRow(f func(row int)) {
	n := len(b.rows)
	b.pool.Run((n+rowsPerTask-1)/rowsPerTask, func(_, task int) {
		for r := task * rowsPerTask; r < min(n, (task+1)*rowsPerTask); r++ {
			f(r)
		}
	})
}

func (b *batch) norm(w []float32) {
	b.eachRow(func(r int) {
		at := r * b.Dim
		b.im.RMSNorm(b.buf.h[at:at+b.Dim], b.buf.x[at:at+b.Dim], w, b.Eps)
	})
}

// project computes queries, keys and values of a layer.
func (b *batch) project(l int) {
	ly, f, n := &b.layers[l], &b.buf, len(b.rows)
	b.norm(ly.attnNorm)
	ms, outs := [3]*kernel.Matrix{&ly.q, &ly.k, &ly.v}, [3][]float32{f.q, f.k, f.v}
	b.pool.Run(len(b.qkv), func(thread, task int) {
		p := b.qkv[task]
		m := ms[p.m]
		b.im.Mul(outs[p.m][p.from:], m.Rows, m, p.from, p.to, f.h, b.Dim, n, &b.scratch[thread])
	})
}

// store rotates queries and keys and puts keys and values into the cache.
func (b *batch) store(l int) {
	f := &b.buf
	b.eachRow(func(r int) {
		p := b.rows[r]
		table := b.rope[p.pos*b.HeadDim : (p.pos+1)*b.HeadDim]
		for at := r * b.qDim; at < (r+1)*b.qDim; at += b.HeadDim {
			q := f.q[at : at+b.HeadDim]
			rotate(q, q, table, b.attnScale)
		}
		for i := range b.c.Shards {
			b.storeKV(&b.c.Shards[i], l, r, table)
		}
	})
}

// storeKV puts the heads of one shard of row r into the cache.
func (b *batch) storeKV(s *Shard, l, r int, table []float32) {
	mem, p := b.c.layer(s, l), b.rows[r]
	slot := b.c.slot(s, p.seq.Blocks[p.pos/b.c.BlockTokens], p.pos%b.c.BlockTokens)
	from, n := r*b.kvDim+s.HeadFirst*b.HeadDim, s.HeadCount*b.HeadDim
	keys, values := b.buf.k[from:from+n], b.buf.v[from:from+n]
	for at := 0; at < n; at += b.HeadDim {
		rotate(mem[slot+at:slot+at+b.HeadDim], keys[at:at+b.HeadDim], table, 1)
	}
	copy(mem[slot+b.c.planeFloats(s.HeadCount):], values)
}

// addProduct adds m times in to the residual stream.
func (b *batch) addProduct(m *kernel.Matrix, panels []panel, in []float32, stride int) {
	f, n := &b.buf, len(b.rows)
	b.pool.Run(len(panels), func(thread, task int) {
		p := panels[task]
		b.im.Mul(f.sum[p.from:], b.Dim, m, p.from, p.to, in, stride, n, &b.scratch[thread])
		for r := range n {
			b.im.Add(f.x[r*b.Dim+p.from:r*b.Dim+p.to], f.sum[r*b.Dim+p.from:r*b.Dim+p.to])
		}
	})
}

func (b *batch) feedForward(l int) {
	ly, f, n := &b.layers[l], &b.buf, len(b.rows)
	b.norm(ly.ffnNorm)
	b.pool.Run(len(b.gateUp), func(thread, task int) {
		p := b.gateUp[task]
		b.im.Mul(f.gate[p.from:], b.FFN, &ly.gate, p.from, p.to, f.h, b.Dim, n, &b.scratch[thread])
		b.im.Mul(f.up[p.from:], b.FFN, &ly.up, p.from, p.to, f.h, b.Dim, n, &b.scratch[thread])
		for r := range n {
			at := r * b.FFN
			b.im.SiluMul(f.gate[at+p.from:at+p.to], f.up[at+p.from:at+p.to])
		}
	})
	b.addProduct(&ly.down, b.downs, f.gate, b.FFN)
}

// logits multiplies the last rows of the sequences that want it with the output matrix.
func (b *batch) logits(seqs []*Seq) {
	f, n, row := &b.buf, 0, 0
	var outs [][]float32
	for _, s := range seqs {
		row += len(s.Tokens)
		if s.Logits {
			x := f.x[(row-1)*b.Dim : row*b.Dim]
			b.im.RMSNorm(f.h[n*b.Dim:(n+1)*b.Dim], x, b.outNorm, b.Eps)
			outs = append(outs, s.Out)
			n++
		}
	}
	if n == 0 {
		return
	}
	per := b.out.PanelRows(n, b.pool.Threads())
	b.pool.Run((b.Vocab+per-1)/per, func(thread, task int) {
		from, to := task*per, min((task+1)*per, b.Vocab)
		tmp := grow(&f.tmp[thread], n*(to-from))
		b.im.Mul(tmp, to-from, &b.out, from, to, f.h, b.Dim, n, &b.scratch[thread])
		for i, out := range outs {
			copy(out[from:to], tmp[i*(to-from):(i+1)*(to-from)])
		}
	})
}
