package prefix

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/tinylib/msgp/msgp"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/router/collect"
)

// captured is a batch of a real vLLM 0.32.0: two blocks of 32 tokens, with the cache_salt "salty".
const captured = "93cb41dac05c60b57b1d918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf1d4476291f7a988fcfa9e58e6dfb0fc2a8b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0040cc93cd0250cd036dcd033fcd03184acd010fcc82cd0205cd0315cd01d6cd01edcd02a5cd018ecd0331cce06acd01fd27cd039ccd0361cd0199cd01c5cd0278cd0316cd031b0ccd02d2cd01d2cd011acd02eccd033fccf4cd0267cd03d172cd03a5cd014f292024cd02a3cd023413cd03cbcd0390cd0190cd02c8cce7cd01bacd02f127cd0226ccedcd0318cd01cacd03cbcd0205cd0240ccf8cd016bccf6cd02bfcceaaa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a573616c7479c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"

var capturedTokens = []uint32{147, 592, 877, 831, 792, 74, 271, 130, 517, 789, 470, 493, 677, 398, 817, 224, 106, 509, 39, 924, 865, 409, 453, 632, 790, 795, 12, 722, 466, 282, 748, 831,
	244, 615, 977, 114, 933, 335, 41, 32, 36, 675, 564, 19, 971, 912, 400, 712, 231, 442, 753, 39, 550, 237, 792, 458, 971, 517, 576, 248, 363, 246, 703, 234}

// What a request says of itself leads to what an engine's events say of its blocks.
func TestSaltOfARealEvent(t *testing.T) {
	x := newIndex(t, bytesMin)
	batch, err := hex.DecodeString(captured)
	if err != nil {
		t.Fatal(err)
	}
	w := collect.Source{Worker: "w"}
	if err := new(collect.Decoder).Batch(batch, w, x); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		tokens []uint32
		seed   Seed
		want   int
	}{
		{append(capturedTokens[:64:64], 1), Seed{Salt: "salty"}, 64},
		{capturedTokens, Seed{Salt: "salty"}, 32}, // the last token is computed again, and its block with it
		{capturedTokens, Seed{}, 0},
		{capturedTokens, Seed{Salt: "Salty"}, 0},
		{capturedTokens, Seed{LoRA: "salty"}, 0},
		{capturedTokens[1:], Seed{Salt: "salty"}, 0},
		{nil, Seed{Salt: "salty"}, 0},
	} {
		if got := x.Lookup(test.tokens, test.seed, []string{"w"}, nil)[0]; got.Tokens != test.want || got.Approximate {
			t.Errorf("%d tokens, %+v: %+v, want %d", len(test.tokens), test.seed, got, test.want)
		}
	}
	// Its removal as the engine says it.
	x.Removed(w, &collect.Removed{Keys: []collect.Key{0xa9e58e6dfb0fc2a8}, Medium: "GPU"})
	if got := x.Lookup(append(capturedTokens[:64:64], 1), Seed{Salt: "salty"}, []string{"w"}, nil)[0]; got.Tokens != 32 {
		t.Errorf("%+v when the second block is gone", got)
	}
}

// pack is msgpack of strings, integers, bytes and lists of these.
func pack(b []byte, v any) []byte {
	switch v := v.(type) {
	case string:
		return msgp.AppendString(b, v)
	case int:
		return msgp.AppendInt(b, v)
	case uint64:
		return msgp.AppendUint64(b, v)
	case []byte:
		return msgp.AppendBytes(b, v)
	case []any:
		b = msgp.AppendArrayHeader(b, uint32(len(v)))
		for _, e := range v {
			b = pack(b, e)
		}
		return b
	}
	return msgp.AppendNil(b)
}

// Keys with the tags of vLLM's own hash, and those that its events have, are one; those of different tenants are not.
func TestExtraKeys(t *testing.T) {
	type list = []any
	digest := []byte("0123456789abcdef0123456789abcdef")
	classes := [][]list{
		{{}, {"lo"}, {list{"lora", "lo", "/path"}}, {list{"lora", "lo"}}},
		{{"a"}, {list{"cache_salt", "a"}}, {"lo", "a"}, {list{"lora", "lo", "/path"}, list{"cache_salt", "a"}}},
		{{"b"}, {list{"cache_salt", "b"}}},
		{{"a", "lo"}}, // a salt that is called as the adapter
		{{list{"picture", 3}}, {list{"mm", "picture", 3}}, {"lo", list{"mm", "picture", 3}}, {list{"picture", uint64(3)}}},
		{{list{"picture", 4}}},
		{{list{"picture", -4}}},
		{{list{"picture", 3}, "a"}, {list{"mm", "picture", 3}, list{"cache_salt", "a"}}},
		{{list{"picture", 3}, list{"other", 9}}},
		{{digest}, {list{"prompt_embeds", digest}}},
		{{string(digest)}},
		{{list{"a"}}},
		{{"a", "a"}},
	}
	seen := map[uint64]int{}
	for i, class := range classes {
		for _, keys := range class {
			h, err := extraOf(pack(nil, keys), "lo")
			if err != nil {
				t.Fatalf("%q: %v", keys, err)
			}
			if at, ok := seen[h]; ok && at != i {
				t.Errorf("%q has the hash of %q", keys, classes[at])
			}
			seen[h] = i
		}
		if len(seen) != i+1 {
			t.Errorf("%q have %d hashes", class, len(seen)-i)
		}
	}
	if h, err := extraOf(pack(nil, nil), ""); h != 0 || err != nil {
		t.Error(h, err)
	}
	seed := Seed{Salt: "a"}
	if h, _ := extraOf(pack(nil, list{"a"}), ""); h != seed.extra() {
		t.Error("a request's salt is not an event's")
	}
}

func FuzzExtra(f *testing.F) {
	f.Add(pack(nil, []any{"lo", []any{"mm", "x", 3}, []any{"cache_salt", "a"}, []byte("d")}), "lo")
	f.Add([]byte{0x92, 0xc1}, "")
	f.Fuzz(func(t *testing.T, b []byte, lora string) {
		h, err := extraOf(b, lora)
		again, errAgain := extraOf(append(b[:len(b):len(b)], 0xff), lora)
		if err == nil && (errAgain != nil || h != again) && len(b) > 0 {
			t.Errorf("%x: %x, and %x, %v with a byte behind it", b, h, again, errAgain)
		}
	})
}

// Hashes are in snapshots that other versions read: a change needs another hashVersion.
func TestHashesStay(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4}
	seed := Seed{LoRA: "x", Salt: "a"}
	for _, test := range []struct {
		got  Hash
		want string
	}{
		{chain(rootOf(""), sum(tokens), 0), "85e6d1c737123ec5"},
		{chain(chain(rootOf("x"), sum(tokens), seed.extra()), sum(tokens), 0), "1570e68ef41bba4f"},
	} {
		if got := fmt.Sprintf("%016x", uint64(test.got)); got != test.want {
			t.Errorf("%s, want %s", got, test.want)
		}
	}
}

// Blocks of other media, of other groups and finer ones do not count; better ones take the place of what was known.
func TestWhatCounts(t *testing.T) {
	tokens := make([]uint32, 33)
	w := collect.Source{Worker: "w"}
	event := func(from, to, size int, change func(b *collect.Stored)) *collect.Stored {
		e := newEngine("w", 0, size)
		b := e.stored(Seed{}, tokens, from, to)
		change(b)
		return b
	}
	none := func(*collect.Stored) {}
	for _, test := range []struct {
		name   string
		events []*collect.Stored
		want   int
	}{
		{"all", []*collect.Stored{event(0, 2, 8, none)}, 16},
		{"a CPU's when it is all there is", []*collect.Stored{event(0, 2, 8, func(b *collect.Stored) { b.Medium = "CPU" })}, 16},
		{"moved to a CPU's memory", []*collect.Stored{event(0, 1, 8, none), event(0, 4, 8, func(b *collect.Stored) { b.Medium = "CPU" })}, 8},
		{"GPU behind CPU", []*collect.Stored{event(0, 4, 8, func(b *collect.Stored) { b.Medium = "CPU" }), event(0, 1, 8, none)}, 8},
		{"another group", []*collect.Stored{event(0, 1, 8, none), event(0, 4, 8, func(b *collect.Stored) { b.Group = 1 })}, 8},
		{"a sliding window", []*collect.Stored{event(0, 4, 8, func(b *collect.Stored) { b.Spec = "sliding_window" }), event(0, 1, 8, func(b *collect.Stored) { b.Group, b.Spec = 1, "full_attention" })}, 8},
		{"a part of a block", []*collect.Stored{event(0, 2, 8, none), event(4, 6, 4, none)}, 16},
		{"larger blocks", []*collect.Stored{event(0, 2, 4, none), event(0, 1, 16, none)}, 16},
		{"tokens that are not all there", []*collect.Stored{event(0, 2, 8, func(b *collect.Stored) { b.Tokens = b.Tokens[1:] })}, 0},
		{"no tokens", []*collect.Stored{event(0, 2, 8, func(b *collect.Stored) { b.Tokens = nil })}, 0},
		{"no size", []*collect.Stored{event(0, 2, 8, func(b *collect.Stored) { b.BlockTokens = 0 })}, 0},
		{"an unknown parent", []*collect.Stored{event(0, 1, 8, none), event(1, 4, 8, func(b *collect.Stored) { b.Parent = 99 })}, 8},
		{"an adapter by its number", []*collect.Stored{event(0, 2, 8, func(b *collect.Stored) { b.LoRAID = 0 })}, 0},
		{"extra keys that cannot be read", []*collect.Stored{event(0, 2, 8, func(b *collect.Stored) { b.Extra[1] = []byte{0xc1} })}, 8},
		{"fewer extra keys than blocks", []*collect.Stored{event(0, 2, 8, func(b *collect.Stored) { b.Extra = b.Extra[:1] })}, 16},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := newIndex(t, bytesMin)
			for _, b := range test.events {
				x.Stored(w, b)
			}
			if got := x.Lookup(tokens, Seed{}, []string{"w"}, nil)[0]; got.Tokens != test.want {
				t.Errorf("%+v, want %d", got, test.want)
			}
			x.check(t)
			for _, b := range test.events {
				for _, k := range b.Keys {
					x.Removed(w, &collect.Removed{Keys: []collect.Key{k}, Medium: "STORAGE"})
					x.Removed(w, &collect.Removed{Keys: []collect.Key{k}, Group: 7, Medium: b.Medium})
				}
			}
			if got := x.Lookup(tokens, Seed{}, []string{"w"}, nil)[0]; got.Tokens != test.want {
				t.Errorf("%+v when others were removed", got)
			}
		})
	}
}

// A key that the engine uses for something else, and one content under two keys.
func TestKeysAndContents(t *testing.T) {
	x := newIndex(t, bytesMin)
	w := collect.Source{Worker: "w"}
	a, b := []uint32{1, 1, 1, 1, 9}, []uint32{2, 2, 2, 2, 9}
	store := func(key collect.Key, tokens []uint32) {
		x.Stored(w, &collect.Stored{Keys: []collect.Key{key}, Tokens: tokens[:4], BlockTokens: 4, LoRAID: -1})
	}
	want := func(na, nb int) {
		t.Helper()
		if got := [2]int{x.Lookup(a, Seed{}, []string{"w"}, nil)[0].Tokens, x.Lookup(b, Seed{}, []string{"w"}, nil)[0].Tokens}; got != [2]int{na, nb} {
			t.Errorf("%v, want %d and %d", got, na, nb)
		}
		x.check(t)
	}
	remove := func(key collect.Key) { x.Removed(w, &collect.Removed{Keys: []collect.Key{key}}) }
	store(1, a)
	store(1, b)
	want(0, 4)
	remove(1)
	want(0, 0)
	store(1, a)
	store(2, a)
	store(3, a)
	remove(1)
	want(4, 0)
	remove(3)
	remove(3)
	want(4, 0)
	remove(2)
	want(0, 0)
	for range 3 {
		store(1, b)
	}
	remove(1)
	remove(1)
	want(0, 4)
	remove(1)
	want(0, 0)
}

// Workers come, go, and come again as other processes.
func TestKeep(t *testing.T) {
	x := newIndex(t, bytesMin)
	prompt := make([]uint32, 100)
	src := func(inc string) collect.Source { return collect.Source{Worker: "w", Incarnation: inc} }
	say := func(inc string) { x.Stored(src(inc), newEngine("w", 0, 4).stored(Seed{}, prompt, 0, 24)) }
	found := func() int { return x.Lookup(prompt, Seed{}, []string{"w"}, nil)[0].Tokens }
	say("1")
	x.Keep([]Worker{{ID: "w", Incarnation: "1"}, {ID: "v"}})
	if found() != 96 {
		t.Error("a worker that there is was forgotten")
	}
	x.Keep([]Worker{{ID: "w", Incarnation: "2"}})
	if found() != 0 || x.Status().Entries != 0 || len(x.Status().Sources) != 0 {
		t.Errorf("%d of another process; %+v", found(), x.Status())
	}
	say("1") // on its way still
	say("2")
	x.Reset(src("1"), "it is not followed any more")
	if st := x.Status(); found() != 96 || len(st.Sources) != 1 || st.Sources[0].Incarnation != "2" {
		t.Errorf("%d, %+v", found(), st)
	}
	x.Reset(src("2"), "a gap")
	if st := x.Status(); found() != 0 || len(st.Sources) != 1 || st.Entries != 0 {
		t.Errorf("%d, %+v", found(), st)
	}
	x.Keep(nil)
	x.Routed("w", prompt, Seed{})
	if st := x.Status(); found() != 0 || len(st.Sources) != 0 || x.side != 0 {
		t.Errorf("%d, %+v, %d bytes beside", found(), st, x.side)
	}
	x.check(t)
}

// Of a worker with several ranks the best one counts.
func TestRanks(t *testing.T) {
	x := newIndex(t, bytesMin)
	prompt := make([]uint32, 100)
	for rank, blocks := range []int{0, 3, 7, 7, 5} {
		e := newEngine("w", rank, 4)
		x.Cleared(e.name)
		if blocks > 0 {
			e.store(x, Seed{}, prompt, 0, blocks)
		}
	}
	if got := x.Lookup(prompt, Seed{}, []string{"w"}, nil)[0]; got != (Match{Tokens: 28, Rank: 2}) {
		t.Errorf("%+v", got)
	}
}

// clock is a time that tests move.
type clock struct{ at atomic.Int64 }

func (c *clock) now() time.Time          { return time.Unix(1<<30+c.at.Load(), 0) }
func (c *clock) forward(d time.Duration) { c.at.Add(int64(d / time.Second)) }

func TestRouted(t *testing.T) {
	var c clock
	x, err := New(Config{Bytes: bytesMin, NotedTTL: time.Minute, Now: c.now})
	if err != nil {
		t.Fatal(err)
	}
	x.Keep([]Worker{{ID: "w", BlockTokens: 16, Blocks: 40}, {ID: "v"}, {ID: "u", BlockTokens: 100}}) // room for ten blocks of 64
	r := rand.New(rand.NewPCG(1, 3))
	draw := func(n int) []uint32 {
		p := make([]uint32, n)
		for i := range p {
			p[i] = r.Uint32()
		}
		return p
	}
	found := func(w string, p []uint32) int {
		m := x.Lookup(p, Seed{}, []string{w}, nil)[0]
		if !m.Approximate || m.Rank != -1 {
			t.Errorf("%+v", m)
		}
		return m.Tokens
	}
	a, b, long := draw(300), draw(300), draw(3000)
	x.Routed("w", a, Seed{})
	if found("w", a) != 256 || found("v", a) != 0 || found("w", b) != 0 || x.Lookup(a, Seed{Salt: "s"}, []string{"w"}, nil)[0].Tokens != 0 {
		t.Error(found("w", a), found("v", a), found("w", b))
	}
	c.forward(10 * time.Second)
	x.Routed("w", b, Seed{})
	c.forward(10 * time.Second)
	x.Routed("w", a, Seed{}) // used again: b goes first, its end first
	c.forward(10 * time.Second)
	x.Routed("w", draw(250), Seed{})
	if found("w", a) != 256 || found("w", b) != 192 {
		t.Errorf("%d and %d tokens of those before", found("w", a), found("w", b))
	}
	x.Routed("w", long, Seed{})
	if found("w", long) != 640 || found("w", a) != 0 {
		t.Errorf("%d of a long one, %d of those before", found("w", long), found("w", a))
	}
	x.Routed("u", a, Seed{})
	if found("u", a) != 200 {
		t.Errorf("%d tokens in blocks of 100", found("u", a))
	}
	c.forward(70 * time.Second)
	if found("w", long); found("w", long) != 0 || x.Status().Entries != 0 {
		t.Errorf("%d when it is too long ago, %+v", found("w", long), x.Status())
	}
	x.check(t)

	// The engine's word takes its place, until it is void.
	x.Routed("w", a, Seed{})
	e := newEngine("w", 0, 16)
	e.name.Incarnation = ""
	e.store(x, Seed{}, a, 0, 2)
	if m := x.Lookup(a, Seed{}, []string{"w"}, nil)[0]; m != (Match{Tokens: 32}) {
		t.Errorf("%+v", m)
	}
	x.Routed("w", b, Seed{})
	if m := x.Lookup(b, Seed{}, []string{"w"}, nil)[0]; m != (Match{}) {
		t.Errorf("%+v", m)
	}
	x.Reset(e.name, "test")
	x.Routed("w", b, Seed{})
	if found("w", b) != 256 {
		t.Error("nothing is noted of a worker that is not heard any more")
	}
	x.check(t)
}

// One that is used all the time does not fill the queue with its old places.
func TestRoutedAgainAndAgain(t *testing.T) {
	var c clock
	x, err := New(Config{Bytes: bytesMin, Now: c.now})
	if err != nil {
		t.Fatal(err)
	}
	hot, cold := make([]uint32, 2000), make([]uint32, 2000)
	for i := range cold {
		cold[i] = uint32(i)
	}
	x.Routed("w", cold, Seed{})
	for range 150 {
		c.forward(5 * time.Second)
		x.Routed("w", hot, Seed{})
	}
	if got := x.Lookup(cold, Seed{}, []string{"w"}, nil)[0].Tokens; got != 1984 {
		t.Errorf("%d tokens of one that there is room for", got)
	}
	if x.side > sourceBytes+planeBytes+100+5*chunkBytes {
		t.Errorf("%d bytes for it", x.side)
	}
	x.check(t)
}

// What goes first: what was noted, then what was looked up least lately, its end before its begin.
func TestWhatIsDrivenOut(t *testing.T) {
	var c clock
	x, err := New(Config{Bytes: bytesMin, Now: c.now})
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(4, 4))
	draw := func(n int) []uint32 {
		p := make([]uint32, n)
		for i := range p {
			p[i] = r.Uint32()
		}
		return p
	}
	e := newEngine("w", 0, 4)
	hot := draw(801)
	e.store(x, Seed{}, hot, 0, 200)
	x.Routed("v", draw(12_801), Seed{})
	fill := func() {
		c.forward(10 * time.Second)
		if n := x.Lookup(hot, Seed{}, []string{"w"}, nil)[0].Tokens; n < 800 {
			t.Fatalf("only %d tokens are left of what is looked up all the time", n)
		}
		e := newEngine("w", 0, 4)
		e.next = collect.Key(r.Uint64())
		e.store(x, Seed{}, draw(400), 0, 100)
	}
	for range 60 {
		fill()
	}
	for range 20 {
		s := x.table.dir[r.IntN(len(x.table.dir))].Load()
		ranks := map[uint64]uint64{}
		for i := range s.slots {
			if e := s.slots[i].entry(); e.k != 0 {
				ranks[e.k] = x.rank(e)
			}
		}
		if len(ranks) == 0 {
			continue
		}
		x.evict(s)
		least, most, gone := uint64(1<<63), uint64(0), 0
		for k, rank := range ranks {
			if x.table.find(k) == nil {
				gone, most = gone+1, max(most, rank)
			}
		}
		for k, rank := range ranks {
			if e := x.table.find(k); e != nil && e.entry().v != 0 {
				least = min(least, rank)
			}
		}
		// A key takes its content along, in whatever segment that is, so a few more may go.
		if gone < max(1, len(ranks)/evictPart) || most > least {
			t.Fatalf("%d of %d went, up to rank %x; %x is kept", gone, len(ranks), most, least)
		}
		x.check(t)
	}
	for range 60 {
		fill()
	}
	if x.figures.evicted[kindNoted].Load() == 0 || x.figures.evicted[kindKey].Load() == 0 {
		t.Error("nothing was driven out")
	}
	if !(rankOf(false, 9, 0) < rankOf(true, 1, 9) && rankOf(true, 1, 0) < rankOf(true, 2, 9) && rankOf(true, 1, 9) < rankOf(true, 1, 8)) {
		t.Error("ranks are out of order")
	}
}

// Many sources, and more than there is place for.
func TestManySources(t *testing.T) {
	x := newIndex(t, 8<<20)
	prompt := make([]uint32, 100)
	var names []string
	for i := range 200 {
		e := newEngine(fmt.Sprint("w", i), 0, 4+4*(i%2))
		names = append(names, e.name.Worker)
		e.store(x, Seed{}, prompt, 0, 1+i%12)
	}
	for i, m := range x.Lookup(prompt, Seed{}, names, nil) {
		if want := (1 + i%12) * (4 + 4*(i%2)); m.Tokens != want {
			t.Errorf("%d: %+v, want %d", i, m, want)
		}
	}
	for i := range 500 {
		x.Lost(collect.Source{Worker: "other", Rank: i}, 1)
	}
	if st := x.Status(); st.TurnedAway < 100 || len(st.Sources) < 400 {
		t.Errorf("%d sources, %d turned away", len(st.Sources), st.TurnedAway)
	}
	x.Keep([]Worker{{ID: "other"}})
	x.check(t)
	x.Keep([]Worker{{ID: "w0", Incarnation: "1"}})
	if st := x.Status(); len(st.Sources) != 0 || x.side != 0 {
		t.Errorf("%+v, %d bytes beside the table", st, x.side)
	}
}

// Lookups go on while all is in motion, and never find what is not there.
func TestLookupsBesideWriters(t *testing.T) {
	leaktest.Check(t)
	x := newIndex(t, bytesMin)
	stays := newEngine("stays", 0, 4)
	r := rand.New(rand.NewPCG(9, 1))
	kept := make([]uint32, 401)
	for i := range kept {
		kept[i] = r.Uint32()
	}
	stays.store(x, Seed{}, kept, 0, 100)
	var stop atomic.Bool
	var writers, readers sync.WaitGroup
	for w := range 3 {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(9, uint64(w)))
			p := &prompts{r: r}
			e := newEngine(fmt.Sprint("w", w), 0, 4)
			for i := range 150 {
				seed, tokens := seeds[r.IntN(len(seeds))], p.draw(200)
				if from, to := e.longest(seed, tokens)/4, len(tokens)/4; from < to {
					e.store(x, seed, tokens, from, to)
				}
				for k := range e.keys {
					e.removeKey(x, k)
					if r.IntN(30) == 0 {
						break
					}
				}
				x.Routed(fmt.Sprint("v", w), tokens, seed)
				switch {
				case i%97 == 0:
					e.clear()
					x.Cleared(e.name)
				case i%89 == 0:
					_ = x.Save(writerFunc(func(b []byte) (int, error) { return len(b), nil }))
				}
			}
		})
	}
	for range 2 {
		readers.Go(func() {
			r := rand.New(rand.NewPCG(10, 1))
			unknown := make([]uint32, 200)
			for !stop.Load() {
				x.Lookup(kept, Seed{}, []string{"stays", "w0", "v1"}, nil)
				for i := range unknown {
					unknown[i] = r.Uint32()
				}
				for _, m := range x.Lookup(unknown, Seed{}, []string{"stays", "w0", "w1", "w2", "v0"}, nil) {
					if m.Tokens != 0 {
						t.Errorf("%+v of what nobody has", m)
						return
					}
				}
				if m := x.Lookup(kept, Seed{Salt: "other"}, []string{"stays"}, nil)[0]; m.Tokens != 0 {
					t.Errorf("%+v of what another tenant has", m)
				}
			}
		})
	}
	writers.Wait()
	stop.Store(true)
	readers.Wait()
	x.check(t)
}

// What stays is found at each of its workers while others make the table grow and shrink around it.
func TestLookupsInManyPlanesBesideAWriter(t *testing.T) {
	leaktest.Check(t)
	x := newIndex(t, 16<<20)
	r := rand.New(rand.NewPCG(11, 1))
	kept := make([]uint32, 401)
	for i := range kept {
		kept[i] = r.Uint32()
	}
	var names []string
	for i := range 150 {
		e := newEngine(fmt.Sprint("w", i), 0, 4)
		names = append(names, e.name.Worker)
		e.store(x, Seed{}, kept, 0, 100)
	}
	var stop atomic.Bool
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for !stop.Load() {
				for i, m := range x.Lookup(kept, Seed{}, names, nil) {
					if m.Tokens != 400 {
						t.Errorf("%s has all, found %+v", names[i], m)
						return
					}
				}
			}
		})
	}
	e := newEngine("other", 0, 4)
	for range 4 {
		for range 60 {
			tokens := make([]uint32, 200)
			for i := range tokens {
				tokens[i] = r.Uint32()
			}
			e.store(x, Seed{}, tokens, 0, 50)
		}
		for k := range e.keys {
			e.removeKey(x, k)
		}
	}
	stop.Store(true)
	readers.Wait()
	x.check(t)
}

// What an index takes of the heap is what it says, and under its limit.
func TestBytesAreOfTheHeap(t *testing.T) {
	const limit = 2 << 20
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	x := newIndex(t, limit)
	var chats []*chat
	for i := range 4 {
		chats = append(chats, newChat(fmt.Sprint("w", i), 1<<15))
	}
	for i := range 100 {
		x.Routed(fmt.Sprint("v", i), make([]uint32, 20_000), Seed{Salt: fmt.Sprint(i)})
	}
	most := int64(0)
	for round := range 6 {
		for _, c := range chats {
			for range 50 {
				c.turn(x)
			}
		}
		if round == 3 {
			x.Reset(chats[0].name, "test")
		}
		used, says := heap()-before, x.Status().Bytes
		most = max(most, used)
		if used > limit || used > says+says/20 {
			t.Errorf("%d bytes of the heap; it says %d of %d", used, says, limit)
		}
	}
	if st := x.Status(); most < limit*8/10 || st.Evicted == 0 {
		t.Errorf("at most %d bytes of %d were used", most, limit)
	}
	x.check(t)
	for _, c := range chats {
		x.Cleared(c.name)
	}
	x.Keep(nil)
	if used := heap() - before; used > limit/4 {
		t.Errorf("%d bytes are kept for nothing", used)
	}
	x.check(t)
	runtime.KeepAlive(chats)
}

func TestMetrics(t *testing.T) {
	x := newIndex(t, bytesMin)
	e := newEngine("w", 0, 4)
	prompt := make([]uint32, 100)
	e.store(x, Seed{}, prompt, 0, 20)
	x.Routed("v", prompt, Seed{})
	x.Lookup(prompt, Seed{}, []string{"w"}, nil)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(x)
	families := func() map[string]float64 {
		all, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		values := map[string]float64{}
		for _, f := range all {
			for _, m := range f.Metric {
				name := strings.TrimPrefix(f.GetName(), "headrace_router_prefix_index_")
				for _, l := range m.Label {
					name += " " + l.GetValue()
				}
				values[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
		return values
	}
	got := families()
	for name, want := range map[string]float64{"blocks told": 20, "blocks noted": 1, "sources told": 1, "sources noted": 1, "lookups_total": 1, "lookup_tokens_total all": 100,
		"lookup_tokens_total found": 80, "event_blocks_total stored": 21, "limit_bytes": bytesMin, "entries": 42} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
	x.Keep(nil)
	if got := families(); got["event_blocks_total stored"] != 21 || got["sources told"] != 0 || got["entries"] != 0 {
		t.Errorf("%v when all have gone", got)
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{{Bytes: 1}, {Bytes: -1}, {NotedTTL: -1}, {NotedTokens: -1}, {NotedBlock: 1 << 20}} {
		if x, err := New(c); err == nil || x != nil {
			t.Errorf("%+v is taken", c)
		}
	}
}
