package collect

import (
	"encoding/hex"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// recorder writes down what it is told.
type recorder struct{ said []string }

func (r *recorder) add(format string, args ...any) {
	r.said = append(r.said, fmt.Sprintf(format, args...))
}

func (r *recorder) Stored(_ Source, b *Stored) {
	parent := "none"
	if b.HasParent {
		parent = fmt.Sprint(b.Parent)
	}
	r.add("stored %d behind %s, tokens %d x %d, %s/%d lora %q %d extra %q", b.Keys, parent, len(b.Tokens), b.BlockTokens, b.Medium, b.Group, b.LoRA, b.LoRAID, b.Extra)
}
func (r *recorder) Removed(_ Source, b *Removed) {
	r.add("removed %d of %s/%d", b.Keys, b.Medium, b.Group)
}
func (r *recorder) Cleared(Source)             { r.add("cleared") }
func (r *recorder) Reset(_ Source, why string) { r.add("reset: %s", why) }
func (r *recorder) Lost(_ Source, n uint64)    { r.add("lost %d", n) }
func (r *recorder) text() string               { return strings.Join(r.said, "\n") }

// captured is a batch of a real vLLM 0.32.0: two blocks of 32 tokens, with a cache_salt.
const captured = "93cb41dac05c60b57b1d918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf1d4476291f7a988fcfa9e58e6dfb0fc2a8b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0040cc93cd0250cd036dcd033fcd03184acd010fcc82cd0205cd0315cd01d6cd01edcd02a5cd018ecd0331cce06acd01fd27cd039ccd0361cd0199cd01c5cd0278cd0316cd031b0ccd02d2cd01d2cd011acd02eccd033fccf4cd0267cd03d172cd03a5cd014f292024cd02a3cd023413cd03cbcd0390cd0190cd02c8cce7cd01bacd02f127cd0226ccedcd0318cd01cacd03cbcd0205cd0240ccf8cd016bccf6cd02bfcceaaa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a573616c7479c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"

func unhex(t testing.TB, s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// build appends msgpack of v: nil, ints, uints, strings, bytes, []any, and maps as []pair.
type pair struct {
	k string
	v any
}

func build(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return msgp.AppendNil(b)
	case int:
		return msgp.AppendInt(b, v)
	case uint64:
		return msgp.AppendUint64(b, v)
	case float64:
		return msgp.AppendFloat64(b, v)
	case string:
		return msgp.AppendString(b, v)
	case []byte:
		return msgp.AppendBytes(b, v)
	case []any:
		b = msgp.AppendArrayHeader(b, uint32(len(v)))
		for _, x := range v {
			b = build(b, x)
		}
		return b
	case []pair:
		b = msgp.AppendMapHeader(b, uint32(len(v)))
		for _, x := range v {
			b = build(msgp.AppendString(b, x.k), x.v)
		}
		return b
	}
	panic(fmt.Sprintf("%T", v))
}

type list = []any

func TestBatches(t *testing.T) {
	tokens := list{1, 2, 70000, 4}
	for _, tt := range []struct {
		name  string
		batch []byte
		want  string
	}{
		{"of a real vLLM", unhex(t, captured), `stored [2108940444510099599 12242347765091254952] behind none, tokens 64 x 32, GPU/0 lora "" -1 extra ["\x91\xa5salty" ""]`},
		{"arrays", build(nil, list{1.5, list{
			list{"BlockStored", list{10, 11}, 9, tokens, 2, 3, "GPU", "ad", nil, 1},
			list{"BlockRemoved", list{10}, "CPU", 1}, list{"AllBlocksCleared"}}, 0}),
			"stored [10 11] behind 9, tokens 4 x 2, GPU/1 lora \"ad\" 3 extra []\nremoved [10] of CPU/1\ncleared"},
		{"the oldest arrays", build(nil, list{1.5, list{list{"BlockStored", list{10}, nil, list{5, 6}, 2, nil}, list{"BlockRemoved", list{10}}}}),
			"stored [10] behind none, tokens 2 x 2, /0 lora \"\" -1 extra []\nremoved [10] of /0"},
		{"a map of maps, kind last", build(nil, []pair{{"new", list{list{1}}}, {"data_parallel_rank", 3}, {"events", list{
			[]pair{{"block_size", 2}, {"unheard_of", []pair{{"a", list{1, nil}}}}, {"token_ids", tokens}, {"block_hashes", list{1, 2}}, {"type", "BlockStored"}},
			[]pair{{"block_hashes", list{1}}, {"type", "BlockRemoved"}},
			[]pair{{"type", "AllBlocksCleared"}}}}, {"ts", 1.0}}),
			"stored [1 2] behind none, tokens 4 x 2, /0 lora \"\" -1 extra []\nremoved [1] of /0\ncleared"},
		{"unknown kinds", build(nil, list{1.0, list{list{"BlockPainted", list{1}, "blue"}, []pair{{"type", "Else"}, {"block_hashes", "odd"}}, []pair{}, list{"AllBlocksCleared", 1, 2}}}), "cleared"},
		{"hashes of all sorts", build(nil, list{1.0, list{list{"BlockRemoved", list{-1, uint64(1 << 63), append(make([]byte, 24), 0, 0, 0, 0, 0, 0, 1, 2)}}}}), "removed [18446744073709551615 9223372036854775808 258] of /0"},
		{"tokens of another sort", build(nil, list{1.0, list{list{"BlockStored", list{1}, nil, list{1, list{2, 3}}, 2, nil}}}), "stored [1] behind none, tokens 0 x 2, /0 lora \"\" -1 extra []"},
		{"nothing", build(nil, list{1.0, list{}}), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var d decoder
			for range 2 { // the second time into memory that is used again
				var r recorder
				if err := d.batch(tt.batch, Source{}, &r); err != nil {
					t.Fatal(err)
				}
				if r.text() != tt.want {
					t.Errorf("got\n%s\nwant\n%s", r.text(), tt.want)
				}
			}
		})
	}
}

func TestUnreadableBatches(t *testing.T) {
	deep := list{1}
	for range 100 {
		deep = list{deep}
	}
	for name, b := range map[string][]byte{
		"empty":           nil,
		"no events":       build(nil, list{1.0}),
		"a number":        build(nil, 5),
		"events a number": build(nil, list{1.0, 5}),
		"cut":             unhex(t, captured)[:200],
		"a huge array":    {0x93, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff},
		"a huge map":      {0x93, 0xc0, 0x91, 0xdf, 0xff, 0xff, 0xff, 0xff},
		"too deep":        build(nil, list{1.0, list{list{"BlockPainted", deep}}}),
		"no block size":   build(nil, list{1.0, list{list{"BlockStored", list{1}, nil, list{1}}}}),
		"a float hash":    build(nil, list{1.0, list{list{"BlockRemoved", list{1.5}}}}),
	} {
		t.Run(name, func(t *testing.T) {
			var d decoder
			var r recorder
			if err := d.batch(b, Source{}, &r); err == nil {
				t.Errorf("read as %s", r.text())
			}
		})
	}
}

func FuzzBatch(f *testing.F) {
	f.Add(unhex(f, captured))
	f.Add(build(nil, list{1.5, list{list{"BlockStored", list{10, 11}, 9, list{1, 2}, 1, 3, "GPU", "ad", nil, 1}, list{"BlockRemoved", list{10}, "CPU", 1}, list{"AllBlocksCleared"}}, 0}))
	f.Add(build(nil, []pair{{"events", list{[]pair{{"block_hashes", list{1}}, {"type", "BlockRemoved"}}}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var a, again recorder
		var d decoder
		var h holdings
		errA := d.batch(b, Source{}, sinks{&a, &h})
		errB := d.batch(b, Source{}, &again)
		if !reflect.DeepEqual(a, again) || (errA == nil) != (errB == nil) {
			t.Errorf("read as %q (%v), then as %q (%v)", a.said, errA, again.said, errB)
		}
		if h.blocks < 0 || h.tokens < 0 || h.blocks < int64(len(h.set)) || len(h.set) > len(b) {
			t.Errorf("%d blocks of %d contents, %d tokens", h.blocks, len(h.set), h.tokens)
		}
	})
}

func TestReadingMakesNoGarbage(t *testing.T) {
	b := unhex(t, captured)
	var d decoder
	sink := nothing{}
	if err := d.batch(b, Source{}, sink); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() { _ = d.batch(b, Source{}, sink) }); n > 0 {
		t.Errorf("%v allocations a batch", n)
	}
}

type nothing struct{}

func (nothing) Stored(Source, *Stored)   {}
func (nothing) Removed(Source, *Removed) {}
func (nothing) Cleared(Source)           {}
func (nothing) Reset(Source, string)     {}
func (nothing) Lost(Source, uint64)      {}

// BenchmarkBatch is a prompt of 100 blocks of 16 tokens.
func BenchmarkBatch(b *testing.B) {
	hashes, tokens := list{}, list{}
	for i := range 100 {
		hashes = append(hashes, uint64(i)<<40|1<<63)
	}
	for i := range 1600 {
		tokens = append(tokens, i*19)
	}
	batch := build(nil, list{1.0, list{[]pair{{"type", "BlockStored"}, {"block_hashes", hashes}, {"parent_block_hash", nil}, {"token_ids", tokens}, {"block_size", 16}, {"medium", "GPU"}}}, 0})
	for name, sink := range map[string]Sink{"decode": nothing{}, "held": &holdings{}} {
		b.Run(name, func(b *testing.B) {
			var d decoder
			for b.Loop() {
				if err := d.batch(batch, Source{}, sink); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(100*b.N)/b.Elapsed().Seconds(), "blocks/s")
		})
	}
}
