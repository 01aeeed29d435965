package prefix

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/headrace/headrace/router/collect"
)

// chat is a stream of events as of a full cache: requests of 64 new blocks below 16 old ones, and as many blocks removed.
type chat struct {
	r      *rand.Rand
	name   collect.Source
	stored collect.Stored
	next   uint64
	oldest uint64
	most   uint64
}

func newChat(worker string, most uint64) *chat {
	c := &chat{r: rand.New(rand.NewPCG(1, 2)), name: collect.Source{Worker: worker}, most: most}
	c.stored = collect.Stored{Keys: make([]collect.Key, 64), Tokens: make([]uint32, 64*16), BlockTokens: 16, LoRAID: -1, Medium: "GPU"}
	return c
}

// turn stores 64 blocks, and removes as many once the cache is full.
func (c *chat) turn(sink collect.Sink) {
	b := &c.stored
	b.HasParent = c.next > 0 && c.next%512 != 0
	b.Parent = collect.Key(avalanche(c.next))
	for i := range b.Keys {
		c.next++
		b.Keys[i] = collect.Key(avalanche(c.next))
	}
	for i := range b.Tokens {
		b.Tokens[i] = c.r.Uint32()
	}
	sink.Stored(c.name, b)
	if c.next <= c.most {
		return
	}
	var one [1]collect.Key
	for range b.Keys { // an event each, as vLLM does
		c.oldest++
		one[0] = collect.Key(avalanche(c.oldest))
		sink.Removed(c.name, &collect.Removed{Keys: one[:], Medium: "GPU"})
	}
}

// Blocks a second, stored and removed, at a full cache of half a million blocks.
func BenchmarkEvents(b *testing.B) {
	x := newIndex(b, 256<<20)
	c := newChat("w", 1<<19)
	for c.next < c.most {
		c.turn(x)
	}
	b.ReportAllocs()
	blocks := 0
	for b.Loop() {
		c.turn(x)
		blocks += 2 * len(c.stored.Keys)
	}
	b.ReportMetric(float64(blocks)/b.Elapsed().Seconds(), "blocks/s")
	b.ReportMetric(0, "ns/op")
}

// The same, beyond the limit of memory.
func BenchmarkEventsAtTheLimit(b *testing.B) {
	x := newIndex(b, 16<<20)
	c := newChat("w", 1<<19)
	for c.next < c.most {
		c.turn(x)
	}
	blocks := 0
	for b.Loop() {
		c.turn(x)
		blocks += 2 * len(c.stored.Keys)
	}
	b.ReportMetric(float64(blocks)/b.Elapsed().Seconds(), "blocks/s")
	b.ReportMetric(0, "ns/op")
}

// A prompt of 100,000 tokens that every worker has, in an index of two million other blocks.
func BenchmarkLookup(b *testing.B) {
	for _, workers := range []int{1, 8, 64, 256} {
		b.Run(fmt.Sprint(workers), func(b *testing.B) {
			x := newIndex(b, 512<<20)
			r := rand.New(rand.NewPCG(3, 4))
			prompt := make([]uint32, 100_001)
			for i := range prompt {
				prompt[i] = r.Uint32N(1 << 17)
			}
			names := make([]string, workers)
			for i := range names {
				names[i] = fmt.Sprint("w", i)
				e := newEngine(names[i], 0, 16)
				x.Stored(e.name, e.stored(Seed{}, prompt, 0, 6250))
			}
			c := newChat("w0", 1<<21)
			for c.next < c.most {
				c.turn(x)
			}
			out := make([]Match, workers)
			b.ReportAllocs()
			for b.Loop() {
				if x.Lookup(prompt, Seed{}, names, out); out[0].Tokens != 100_000 {
					b.Fatal(out[0])
				}
			}
		})
	}
}
