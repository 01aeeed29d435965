package prefix

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headrace/headrace/router/collect"
)

func TestDisplace(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 1000 {
		tag, x := r.Uint64(), r.Uint64()
		if got := displace(tag, place(tag, x)); got != x {
			t.Fatalf("%x came back as %x", x, got)
		}
	}
}

// wire plays an engine's batches to several routers, each of which connects when it likes.
type wire struct {
	name    collect.Source
	batches [][]func(sink collect.Sink)
}

// Stored and its like make the wire a sink: what is said goes into the last batch.
func (w *wire) say(f func(collect.Sink)) {
	w.batches[len(w.batches)-1] = append(w.batches[len(w.batches)-1], f)
}
func (w *wire) Stored(_ collect.Source, b *collect.Stored) {
	c := *b
	w.say(func(s collect.Sink) { d := c; s.Stored(w.name, &d) })
}
func (w *wire) Removed(_ collect.Source, b *collect.Removed) {
	c := *b
	w.say(func(s collect.Sink) { d := c; s.Removed(w.name, &d) })
}
func (w *wire) Cleared(collect.Source)       { w.say(func(s collect.Sink) { s.Cleared(w.name) }) }
func (w *wire) Reset(collect.Source, string) {}
func (w *wire) Lost(collect.Source, uint64)  {}

// play gives batches from..to to a router.
func (w *wire) play(x *Index, from, to int) {
	for i := from; i < to; i++ {
		if x.Begin(w.name, uint64(i), uint64(i)*977) {
			for _, f := range w.batches[i] {
				f(x)
			}
			x.End(w.name, uint64(i), uint64(i)*977)
		}
	}
}

// work has an engine do something, as so many batches.
func (e *engine) work(sink *wire, r *rand.Rand, p *prompts, n int) {
	for range n {
		sink.batches = append(sink.batches, nil)
		for range 1 + r.IntN(3) {
			seed, tokens := seeds[r.IntN(len(seeds))], p.draw(120)
			if from, to := e.longest(seed, tokens)/e.block, len(tokens)/e.block; from < to {
				e.store(sink, seed, tokens, from, to)
			}
			if to := len(tokens) / e.block; to > 0 && r.IntN(5) == 0 {
				e.store(sink, seed, tokens, 0, to)
			}
			for k := range e.keys {
				e.removeKey(sink, k)
				if r.IntN(6) == 0 {
					break
				}
			}
		}
		if r.IntN(40) == 0 {
			e.clear()
			sink.Cleared(e.name)
		}
	}
}

// handOver has b begin with what a knows.
func handOver(t *testing.T, a, b *Index) {
	t.Helper()
	var snapshot bytes.Buffer
	if err := errors.Join(a.Save(&snapshot), b.Load(&snapshot)); err != nil {
		t.Fatal(err)
	}
}

// snapshotOf is what x saves that one engine has told so many batches, and to which a prompt was routed besides.
func snapshotOf(t testing.TB, x *Index, r *rand.Rand, batches, routed int) []byte {
	t.Helper()
	e := newEngine("a", 0, 4)
	w := &wire{name: e.name}
	e.work(w, r, &prompts{r: r}, batches)
	w.play(x, 0, batches)
	x.Routed("b", make([]uint32, routed), Seed{})
	var snapshot bytes.Buffer
	if err := x.Save(&snapshot); err != nil {
		t.Fatal(err)
	}
	return snapshot.Bytes()
}

// Routers that begin with another's snapshot and hear what came since agree with one that heard all.
func TestRoutersConverge(t *testing.T) {
	found := 0
	for seed := range uint64(8) {
		r := rand.New(rand.NewPCG(seed, 11))
		p := &prompts{r: r}
		a, b := newIndex(t, 16<<20), newIndex(t, 16<<20)
		engines := []*engine{newEngine("a", 0, 16), newEngine("a", 1, 16), newEngine("b", 0, 5)}
		var wires []*wire
		for _, e := range engines {
			w := &wire{name: e.name}
			wires = append(wires, w)
			e.work(w, r, p, 30+r.IntN(50))
			w.play(a, 0, len(w.batches))
		}
		handOver(t, a, b)
		b.check(t)
		for _, m := range b.Lookup(p.draw(300), Seed{}, []string{"a", "b"}, nil) {
			if m.Tokens != 0 {
				t.Fatalf("%+v before the engine has confirmed anything", m)
			}
		}
		for i, e := range engines {
			w := wires[i]
			saved := len(w.batches)
			e.work(w, r, p, r.IntN(30))
			w.play(a, saved, len(w.batches))
			b.Lost(w.name, 7) // as of one that connects anew
			w.play(b, saved-1-r.IntN(saved), len(w.batches))
		}
		found += agree(t, p, engines, a, b)
		b.check(t)
		if n := len(engines[0].keys); n > 0 && a.Status().Sources[0].Keys != b.Status().Sources[0].Keys {
			t.Errorf("%d and %d keys", a.Status().Sources[0].Keys, b.Status().Sources[0].Keys)
		}
	}
	if found == 0 {
		t.Error("nothing was found")
	}
}

func agree(t *testing.T, p *prompts, engines []*engine, all ...*Index) int {
	t.Helper()
	found := 0
	for range 200 {
		q, seed := p.draw(120), seeds[p.r.IntN(len(seeds))]
		for _, e := range engines {
			want := 0
			for _, o := range engines {
				if o.name.Worker == e.name.Worker {
					want = max(want, o.longest(seed, q))
				}
			}
			for i, x := range all {
				got := x.Lookup(q, seed, []string{e.name.Worker}, nil)[0]
				if got.Tokens != want || got.Approximate {
					t.Fatalf("router %d found %+v at %s; it has %d", i, got, e.name.Worker, want)
				}
				found += want
			}
		}
	}
	return found
}

// A snapshot that the engine's next batches do not follow is void, and what comes is right.
func TestSnapshotsOfAnotherProcess(t *testing.T) {
	for _, test := range []struct {
		name string
		from int    // first batch heard
		sum  uint64 // what is wrong with the sums
		kept bool
	}{
		{name: "the last batch is there", from: 39, kept: true},
		{name: "the next one comes first", from: 40, kept: true},
		{name: "batches are missing", from: 41},
		{name: "the last batch is another", from: 39, sum: 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(5, 5))
			p := &prompts{r: r}
			e := newEngine("a", 0, 4)
			w := &wire{name: e.name}
			e.work(w, r, p, 40)
			a, b := newIndex(t, bytesMin), newIndex(t, bytesMin)
			w.play(a, 0, 40)
			handOver(t, a, b)
			before := b.Status().Sources[0].Keys
			if before == 0 || before != a.Status().Sources[0].Keys {
				t.Fatalf("%d keys loaded", before)
			}
			b.Lost(e.name, 30)
			seq := uint64(test.from)
			b.Begin(e.name, seq, (seq*977)^test.sum)
			if got := b.Status().Sources[0]; (got.Keys == before) != test.kept || got.Heard != test.kept || !test.kept && got.Keys != 0 {
				t.Errorf("%+v", got)
			}
			b.check(t)
		})
	}
}

// A snapshot waits for the end of a batch, and not for one that never ends because its worker goes.
func TestSaveWhileAWorkerGoes(t *testing.T) {
	x := newIndex(t, bytesMin)
	e := newEngine("a", 0, 4)
	e.store(x, Seed{}, make([]uint32, 100), 0, 20)
	if !x.Begin(e.name, 7, 7) {
		t.Fatal("a batch is not wanted")
	}
	saved := make(chan error, 1)
	go func() { saved <- x.Save(io.Discard) }()
	x.Keep([]Worker{{ID: "b"}})
	x.End(e.name, 7, 7)
	select {
	case err := <-saved:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("it still waits")
	}
}

// What is told without numbers is not taken for a continuation.
func TestSnapshotsAreDoubted(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	e := newEngine("a", 0, 4)
	w := &wire{name: e.name}
	e.work(w, r, &prompts{r: r}, 40)
	a, b := newIndex(t, bytesMin), newIndex(t, bytesMin)
	w.play(a, 0, 40)
	handOver(t, a, b)
	tokens := []uint32{1, 2, 3, 4, 5}
	b.Stored(e.name, newEngine("a", 0, 4).stored(Seed{}, tokens, 0, 1))
	if got := b.Status().Sources[0]; got.Keys != 1 || !got.Heard {
		t.Errorf("%+v", got)
	}
	if m := b.Lookup(tokens, Seed{}, []string{"a"}, nil)[0]; m.Tokens != 4 {
		t.Errorf("%+v", m)
	}
	b.check(t)
}

// Snapshots carry what was routed, and when.
func TestSnapshotsOfWhatWasRouted(t *testing.T) {
	a, b := newIndex(t, bytesMin), newIndex(t, bytesMin)
	prompt := make([]uint32, 1000)
	a.Routed("w", prompt, Seed{})
	handOver(t, a, b)
	if m := b.Lookup(prompt, Seed{}, []string{"w"}, nil)[0]; m != (Match{Tokens: 960, Rank: -1, Approximate: true}) {
		t.Errorf("%+v", m)
	}
	b.check(t)
}

func TestBrokenSnapshots(t *testing.T) {
	a := newIndex(t, bytesMin)
	r := rand.New(rand.NewPCG(5, 7))
	whole := snapshotOf(t, a, r, 20, 1000)
	for i := 0; i < len(whole); i += 1 + len(whole)/300 {
		b := newIndex(t, bytesMin)
		if err := b.Load(bytes.NewReader(whole[:i])); !errors.Is(err, ErrSnapshot) {
			t.Fatalf("cut off at %d: %v", i, err)
		}
		b.check(t)
		bent := bytes.Clone(whole)
		bent[i] ^= 1 << r.IntN(8)
		if err := b.Load(bytes.NewReader(bent)); !errors.Is(err, ErrSnapshot) {
			t.Fatalf("bent at %d: %v", i, err)
		}
		b.check(t)
	}
	wants := errors.New("enough")
	if err := a.Save(writerFunc(func([]byte) (int, error) { return 0, wants })); !errors.Is(err, wants) {
		t.Error(err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// FuzzLoad holds that no snapshot breaks the index, checksums right or wrong.
func FuzzLoad(f *testing.F) {
	snapshot := snapshotOf(f, newIndex(f, bytesMin), rand.New(rand.NewPCG(5, 7)), 3, 300)
	f.Add(snapshot, false)
	f.Add(payloads(snapshot), true)
	f.Fuzz(func(t *testing.T, b []byte, sealed bool) {
		if sealed {
			b = seal(b)
		}
		x := newIndex(t, bytesMin)
		if err := x.Load(bytes.NewReader(b)); err != nil && !errors.Is(err, ErrSnapshot) {
			t.Error(err)
		}
		x.check(t)
		var again bytes.Buffer
		if err := errors.Join(x.Save(&again), newIndex(t, bytesMin).Load(&again)); err != nil {
			t.Error(err)
		}
	})
}

// payloads takes a snapshot apart: kind, length of two bytes, payload, and so on. seal puts it together, checksums included.
func payloads(b []byte) []byte {
	in := &reader{r: bufio.NewReader(bytes.NewReader(b[8:]))}
	var out []byte
	for {
		kind, p, err := in.section()
		if err != nil {
			return out
		}
		out = append(out, kind, byte(len(p)), byte(len(p)>>8))
		out = append(out, p...)
	}
}

func seal(b []byte) []byte {
	out := bytes.NewBuffer(snapshotMagic[:len(snapshotMagic):len(snapshotMagic)])
	for len(b) >= 3 {
		n := min(int(b[1])|int(b[2])<<8, len(b)-3)
		_ = section(out, b[0], b[3:3+n])
		b = b[3+n:]
	}
	return out.Bytes()
}
