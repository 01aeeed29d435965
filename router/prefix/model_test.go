package prefix

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/headrace/headrace/router/collect"
)

// engine is a naive engine: how many blocks it has of each content, which is named by all the tokens up to its end.
type engine struct {
	name  collect.Source
	block int
	keys  map[collect.Key]content
	have  map[string]int // by content
	next  collect.Key
	names map[string]collect.Key
}

type content struct {
	id     string
	blocks int
}

func newEngine(worker string, rank, block int) *engine {
	e := &engine{name: collect.Source{Worker: worker, Incarnation: "1", Rank: rank}, block: block}
	e.clear()
	return e
}

func (e *engine) clear() {
	e.keys, e.have, e.names = map[collect.Key]content{}, map[string]int{}, map[string]collect.Key{}
}

// id names a content: everything that keeps it apart from others.
func id(seed Seed, tokens []uint32) string {
	return seed.LoRA + "\x00" + seed.Salt + "\x00" + string(asBytes(tokens))
}

// key is the engine's name for a content. Contents that it has not any more may get another one.
func (e *engine) key(name string) collect.Key {
	k, ok := e.names[name]
	if !ok {
		e.next++
		k = collect.Key(avalanche(uint64(e.next)))
		e.names[name] = k
	}
	return k
}

// stored is the event of blocks from..to of a prompt.
func (e *engine) stored(seed Seed, tokens []uint32, from, to int) *collect.Stored {
	b := &collect.Stored{BlockTokens: uint32(e.block), Tokens: tokens[from*e.block : to*e.block], LoRA: seed.LoRA, LoRAID: -1, Medium: "GPU"}
	if from > 0 {
		b.HasParent, b.Parent = true, e.key(id(seed, tokens[:from*e.block]))
	}
	for i := from; i < to; i++ {
		b.Keys = append(b.Keys, e.key(id(seed, tokens[:(i+1)*e.block])))
		var extra []byte
		var list []string
		if seed.LoRA != "" {
			list = append(list, seed.LoRA)
		}
		if seed.Salt != "" && i == 0 {
			list = append(list, seed.Salt)
		}
		if len(list) > 0 {
			extra = msgp.AppendArrayHeader(nil, uint32(len(list)))
			for _, s := range list {
				extra = msgp.AppendString(extra, s)
			}
		}
		b.Extra = append(b.Extra, extra)
	}
	return b
}

// store has blocks from..to of a prompt stored once more.
func (e *engine) store(sink collect.Sink, seed Seed, tokens []uint32, from, to int) {
	b := e.stored(seed, tokens, from, to)
	for i, k := range b.Keys {
		name := id(seed, tokens[:(from+i+1)*e.block])
		c := e.keys[k]
		e.keys[k] = content{name, c.blocks + 1}
		e.have[name]++
	}
	sink.Stored(e.name, b)
}

func (e *engine) removeKey(sink collect.Sink, k collect.Key) {
	c, ok := e.keys[k]
	if ok {
		e.have[c.id]--
		if e.have[c.id] == 0 {
			delete(e.have, c.id)
		}
		if c.blocks--; c.blocks == 0 {
			delete(e.keys, k)
			delete(e.names, c.id)
		} else {
			e.keys[k] = c
		}
	}
	sink.Removed(e.name, &collect.Removed{Keys: []collect.Key{k}, Medium: "GPU"})
}

// longest is what the engine would find of a prompt.
func (e *engine) longest(seed Seed, tokens []uint32) int {
	n := 0
	for (n+1)*e.block < len(tokens) && e.have[id(seed, tokens[:(n+1)*e.block])] > 0 {
		n++
	}
	return n * e.block
}

// prompts draws prompts that begin like each other.
type prompts struct {
	r     *rand.Rand
	known [][]uint32
}

func (p *prompts) draw(most int) []uint32 {
	var tokens []uint32
	if len(p.known) > 0 && p.r.IntN(4) > 0 {
		tokens = p.known[p.r.IntN(len(p.known))]
		tokens = append([]uint32(nil), tokens[:p.r.IntN(len(tokens)+1)]...)
	}
	for n := 1 + p.r.IntN(most); len(tokens) < n; {
		tokens = append(tokens, p.r.Uint32N(1<<17))
	}
	if len(p.known) < 200 {
		p.known = append(p.known, tokens)
	} else {
		p.known[p.r.IntN(len(p.known))] = tokens
	}
	return tokens
}

var seeds = []Seed{{}, {}, {Salt: "a"}, {Salt: "b"}, {LoRA: "x"}, {LoRA: "x", Salt: "a"}, {LoRA: "a"}}

func newIndex(t testing.TB, bytes int64) *Index {
	t.Helper()
	x, err := New(Config{Bytes: bytes})
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// check holds that the table's parts agree with each other, and with what is counted.
func (x *Index) check(t testing.TB) {
	t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	entries, segments := 0, 0
	keys := map[uint16]int64{}
	type ref struct {
		src uint16
		h   Hash
	}
	refs, held := map[ref]int{}, map[uint64]uint64{}
	tags := map[uint64]bool{}
	for i := 0; i < len(x.table.dir); {
		s := x.table.dir[i].Load()
		first, n := x.table.span(uint64(i)<<x.table.shift, s)
		if first != i {
			t.Fatalf("segment of depth %d at %d", s.depth, i)
		}
		for j := range n {
			if x.table.dir[i+j].Load() != s {
				t.Fatalf("directory at %d", i+j)
			}
		}
		live := 0
		for j := range s.slots {
			e := s.slots[j].entry()
			if e.k == 0 {
				continue
			}
			live++
			if int(e.k>>x.table.shift) < first || int(e.k>>x.table.shift) >= first+n || s.find(e.k) != &s.slots[j] {
				t.Fatalf("entry %x is misplaced", e.k)
			}
			switch kindOf(e.m) {
			case kindContent:
				held[e.k] = e.v
				tags[e.k] = true
			case kindKey, kindNoted:
				keys[sourceOf(e.m)]++
				refs[ref{sourceOf(e.m), Hash(e.v)}]++
			}
		}
		if live != s.n {
			t.Fatalf("%d entries in a segment, %d counted", live, s.n)
		}
		entries += live
		segments++
		i += n
	}
	if entries != x.table.entries || segments+len(x.table.free) != x.table.segments || x.table.segments > x.table.most {
		t.Fatalf("%d entries in %d segments, %d free; counted %d, %d of %d", entries, segments, len(x.table.free), x.table.entries, x.table.segments, x.table.most)
	}
	for _, s := range x.ids {
		if s == nil {
			continue
		}
		if s.keys.Load() != keys[s.id] {
			t.Fatalf("%+v has %d keys, %d counted", s.name, keys[s.id], s.keys.Load())
		}
	}
	// Every content of every source has a key: else it would stay for good.
	for r := range refs {
		at := x.ids[r.src].seat.Load()
		k := at.plane.place(r.h)
		held[k] &^= at.bit
	}
	for k, v := range held {
		if v != 0 {
			t.Fatalf("content %x is held by %x without a key", k, v)
		}
	}
	if got := x.table.bytes() + x.side + fixedBytes; got > x.cfg.Bytes {
		t.Fatalf("%d bytes of %d", got, x.cfg.Bytes)
	}
}

func TestFollowsTheModel(t *testing.T) {
	for seed := range uint64(2) {
		r := rand.New(rand.NewPCG(seed, 7))
		x := newIndex(t, 64<<20)
		engines := []*engine{newEngine("a", 0, 16), newEngine("a", 1, 16), newEngine("b", 0, 16), newEngine("c", 0, 4), newEngine("d", 0, 3)}
		follow(t, r, x, engines, 1200, true)
	}
}

// A small index forgets, and is never wrong: what it says is there is there.
func TestFollowsTheModelInLittleMemory(t *testing.T) {
	x := newIndex(t, bytesMin)
	follow(t, rand.New(rand.NewPCG(1, 8)), x, []*engine{newEngine("a", 0, 1), newEngine("b", 0, 1), newEngine("c", 0, 1)}, 350, false)
	if x.Status().Evicted == 0 {
		t.Error("nothing was driven out")
	}
}

// An index that misses what was stored, and hears what hangs below, finds less, and nothing wrong.
func TestFollowsTheModelWithHoles(t *testing.T) {
	var found int
	var orphaned, unheld uint64
	for seed := range uint64(3) {
		r := rand.New(rand.NewPCG(seed, 9))
		x := newIndex(t, 16<<20)
		e := newEngine("a", 0, 4)
		p := &prompts{r: r}
		for range 200 {
			seed, tokens := seeds[r.IntN(len(seeds))], p.draw(300)
			from, to := e.longest(seed, tokens)/4, len(tokens)/4
			if r.IntN(3) == 0 {
				from = 0 // some of it is there
			}
			if from < to {
				var sink collect.Sink = x
				if r.IntN(4) == 0 {
					sink = newIndex(t, bytesMin) // nobody hears it
				}
				e.store(sink, seed, tokens, from, to)
			}
			for k := range e.keys {
				e.removeKey(x, k)
				if r.IntN(12) == 0 {
					break
				}
			}
			q := p.draw(300)
			got := x.Lookup(q, seed, []string{"a"}, nil)[0].Tokens
			if want := e.longest(seed, q); got > want {
				t.Fatalf("found %d of %d tokens", got, want)
			}
			found += got
		}
		x.check(t)
		st := x.Status().Sources[0]
		if orphaned, unheld = orphaned+st.Orphaned, unheld+st.Unheld; st.Changed != 0 {
			t.Errorf("%+v", st)
		}
	}
	if found == 0 || orphaned == 0 || unheld == 0 { // which blocks go is a map's order: of one seed there may be no orphan
		t.Errorf("%d tokens found, %d blocks without their prefix, %d removed that were not held", found, orphaned, unheld)
	}
}

// Of many workers, whose contents lie in several planes, each finds its own: in the midst of prefixes blocks go, and planes go and
// come again.
func TestFollowsTheModelInManyPlanes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 10))
	x := newIndex(t, 64<<20)
	var engines []*engine
	var names []string
	var kept []Worker
	for i := range 140 {
		e := newEngine(fmt.Sprint("w", i), 0, 4)
		engines, names, kept = append(engines, e), append(names, e.name.Worker), append(kept, Worker{ID: e.name.Worker, Incarnation: "1"})
	}
	p := &prompts{r: r}
	first := p.draw(40)
	for len(first) < 8 {
		first = p.draw(40)
	}
	for _, e := range engines { // who come together go together
		e.store(x, Seed{}, first, 0, len(first)/4)
	}
	planes := func() int { return len(x.shape.Load().groups[0].planes) }
	found, most, went := 0, planes(), false
	for step := range 20 {
		tokens, seed := p.draw(40), seeds[r.IntN(len(seeds))]
		few := 1 + r.IntN(4)
		for _, e := range engines {
			if from, to := e.longest(seed, tokens)/4, len(tokens)/4; from < to && r.IntN(few) == 0 {
				e.store(x, seed, tokens, from, from+1+r.IntN(to-from))
			}
			for k := range e.keys {
				if r.IntN(3) > 0 {
					break
				}
				e.removeKey(x, k)
			}
		}
		if step%5 == 4 {
			from, to := 60, 130+r.IntN(10) // who leave
			for _, e := range engines[from:to] {
				e.clear()
			}
			x.Keep(slices.Concat(kept[:from], kept[to:]))
			went = went || planes() < most
			x.check(t)
		}
		for _, q := range [][]uint32{tokens, p.draw(40)} {
			for i, m := range x.Lookup(q, seed, names, nil) {
				if want := engines[i].longest(seed, q); m.Tokens != want {
					t.Fatalf("step %d: worker %s has %d of %d tokens, found %+v", step, names[i], want, len(q), m)
				}
				found += m.Tokens
			}
		}
	}
	x.check(t)
	if found == 0 || most != 3 || !went {
		t.Errorf("%d tokens found, %d planes, and one went: %v", found, most, went)
	}
	emptied(t, x, engines)
}

func follow(t *testing.T, r *rand.Rand, x *Index, engines []*engine, steps int, exact bool) {
	t.Helper()
	p := &prompts{r: r}
	workers := []string{"a", "b", "c", "d", "nobody"}
	found := 0
	for step := range steps {
		e := engines[r.IntN(len(engines))]
		seed := seeds[r.IntN(len(seeds))]
		tokens := p.draw(200)
		switch c := r.IntN(100); {
		case c < 60: // as a request does: what is missing behind what is there
			from, to := e.longest(seed, tokens)/e.block, len(tokens)/e.block
			if from < to {
				e.store(x, seed, tokens, from, to)
			}
		case c < 65: // the same content again, in other blocks
			if to := len(tokens) / e.block; to > 0 {
				e.store(x, seed, tokens, 0, to)
			}
		case c < 97:
			for k := range e.keys {
				e.removeKey(x, k)
				if r.IntN(12) == 0 {
					break
				}
			}
		case c == 97:
			e.removeKey(x, collect.Key(r.Uint64()))
		case c == 98 && r.IntN(5) == 0:
			e.clear()
			x.Cleared(e.name)
		case c == 99 && r.IntN(5) == 0:
			e.clear()
			x.Reset(e.name, "test")
		}
		for _, q := range [][]uint32{tokens, p.draw(100)} {
			seed := seeds[r.IntN(len(seeds))]
			got := x.Lookup(q, seed, workers, nil)
			for i, w := range workers {
				want := 0
				for _, e := range engines {
					if e.name.Worker == w {
						want = max(want, e.longest(seed, q))
					}
				}
				if got[i].Tokens > want || exact && got[i].Tokens < want {
					t.Fatalf("step %d: worker %s has %d of %d tokens, found %+v", step, w, want, len(q), got[i])
				}
				found += got[i].Tokens
			}
		}
		if step%100 == 0 {
			x.check(t)
		}
	}
	x.check(t)
	if found == 0 {
		t.Error("nothing was ever found")
	}
	emptied(t, x, engines)
}

// emptied takes everything away, and holds that nothing stays.
func emptied(t *testing.T, x *Index, engines []*engine) {
	t.Helper()
	for _, e := range engines {
		for k, c := range e.keys {
			for range c.blocks {
				e.removeKey(x, k)
			}
		}
	}
	x.check(t)
	if n := x.Status().Entries; n != 0 {
		t.Errorf("%d entries are left when all blocks are gone", n)
	}
}
