package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/headrace/headrace/router/collect"
	"github.com/headrace/headrace/router/prefix"
)

// IndexOptions say what Index measures. The zero value is the whole run.
type IndexOptions struct {
	Duration time.Duration // of each row; 5 s when 0
	Churn    time.Duration // at the byte limit; Duration when 0
	Bytes    int64         // limit of the index under churn; 256 MiB when 0
	Workers  int           // 8 when 0
	Progress io.Writer

	prompt int // tokens that are looked up; 100,000 when 0
	held   int // blocks of each engine's cache; 65,536 when 0
}

// IndexReport is what Index found, one JSON document.
type IndexReport struct {
	Kind     string     `json:"kind"`
	Version  int        `json:"version"`
	Time     time.Time  `json:"time"`
	Complete bool       `json:"complete"`
	Machine  Machine    `json:"machine"`
	Rows     []IndexRow `json:"rows"`
	Churn    *IndexHeap `json:"churn,omitempty"`
}

// IndexRow is one figure, and the one that it must reach.
type IndexRow struct {
	Name   string  `json:"name"`
	What   string  `json:"what"`
	Value  float64 `json:"value"`
	Unit   string  `json:"unit"`
	Target float64 `json:"target"`
	Less   bool    `json:"less_is_better,omitempty"`
	Met    bool    `json:"met"`
}

// IndexHeap is what the index took of the heap under churn.
type IndexHeap struct {
	Seconds    float64 `json:"seconds"`
	LimitBytes int64   `json:"limit_bytes"`
	SaysBytes  int64   `json:"says_bytes_max"`
	HeapBytes  int64   `json:"heap_bytes_max"` // in use after a collection, less what was there before
	Samples    int     `json:"samples"`
	Evicted    uint64  `json:"evicted_blocks"`
	Blocks     uint64  `json:"blocks"`
}

// IndexVersion counts changes of the document that a reader would notice.
const IndexVersion = 1

const indexBlock = 16

func (o IndexOptions) withDefaults() (IndexOptions, error) {
	if o.Duration == 0 {
		o.Duration = 5 * time.Second
	}
	if o.Churn == 0 {
		o.Churn = o.Duration
	}
	if o.Bytes == 0 {
		o.Bytes = 256 << 20
	}
	if o.Workers == 0 {
		o.Workers = 8
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	if o.prompt == 0 {
		o.prompt = 100_000
	}
	if o.held == 0 {
		o.held = 1 << 16
	}
	if o.Duration < 0 || o.Churn < 0 || o.Bytes < 1<<20 || o.Workers < 1 || o.Workers > 1000 {
		return o, errors.New("durations must be positive, the limit 1 MiB or more, workers 1 to 1000")
	}
	return o, nil
}

// Check says what is wrong with o, before anything is started.
func (o IndexOptions) Check() error {
	_, err := o.withDefaults()
	return err
}

// Index measures the router's prefix index alone: on one processor, everything that changes it in one goroutine.
func Index(ctx context.Context, o IndexOptions) (*IndexReport, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &IndexReport{Kind: "index", Version: IndexVersion, Time: time.Now().UTC(), Machine: ThisMachine()}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for _, part := range []func(context.Context, IndexOptions, *IndexReport) error{indexEvents, indexFrames, indexLookups, indexChurn} {
		if err := part(ctx, o, r); err != nil {
			return nil, err
		}
		if ctx.Err() != nil {
			return r, nil
		}
	}
	r.Complete = true
	return r, nil
}

func (r *IndexReport) add(row IndexRow) {
	row.Met = row.Value >= row.Target
	if row.Less {
		row.Met = row.Value <= row.Target
	}
	r.Rows = append(r.Rows, row)
}

// indexEngine makes the events of an engine whose cache is full: what it stores takes the place of its oldest blocks.
type indexEngine struct {
	r            *rand.Rand
	src          collect.Source
	next, oldest uint64
	held         uint64
}

func indexKey(n uint64) collect.Key { return collect.Key(n*0x9E3779B97F4A7C15 ^ n>>7) }

// indexTurn is a request's worth of events: 64 blocks below some before, and an event for each block that makes room.
type indexTurn struct {
	stored  collect.Stored
	removed []collect.Removed
}

func newIndexEngine(i int, held uint64) *indexEngine {
	return &indexEngine{r: rand.New(rand.NewPCG(uint64(i), 1)), src: collect.Source{Worker: "w" + strconv.Itoa(i)}, held: held, next: uint64(i) << 40, oldest: uint64(i) << 40}
}

func (e *indexEngine) turn(t *indexTurn) {
	const n = 64
	b := &t.stored
	*b = collect.Stored{Keys: b.Keys[:0], Tokens: b.Tokens[:0], BlockTokens: indexBlock, LoRAID: -1, Medium: "GPU", HasParent: e.next%512 != 0, Parent: indexKey(e.next)}
	for range n {
		e.next++
		b.Keys = append(b.Keys, indexKey(e.next))
	}
	for range n * indexBlock {
		b.Tokens = append(b.Tokens, e.r.Uint32N(1<<17))
	}
	t.removed = t.removed[:0]
	for e.next-e.oldest > e.held {
		e.oldest++
		t.removed = append(t.removed, collect.Removed{Keys: []collect.Key{indexKey(e.oldest)}, Medium: "GPU"})
	}
}

func (t *indexTurn) tell(src collect.Source, sink collect.Sink) int {
	sink.Stored(src, &t.stored)
	for i := range t.removed {
		sink.Removed(src, &t.removed[i])
	}
	return len(t.stored.Keys) + len(t.removed)
}

// frame is the batch of events as vLLM sends it.
func (t *indexTurn) frame() []byte {
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, 1)
	b = msgp.AppendArrayHeader(b, uint32(1+len(t.removed)))
	s := &t.stored
	b = msgp.AppendMapHeader(b, 10)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(s.Keys)))
	for _, k := range s.Keys {
		b = msgp.AppendUint64(b, uint64(k))
	}
	b = msgp.AppendString(b, "parent_block_hash")
	if s.HasParent {
		b = msgp.AppendUint64(b, uint64(s.Parent))
	} else {
		b = msgp.AppendNil(b)
	}
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(len(s.Tokens)))
	for _, v := range s.Tokens {
		b = msgp.AppendUint32(b, v)
	}
	b = msgp.AppendUint32(msgp.AppendString(b, "block_size"), s.BlockTokens)
	b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "extra_keys"), uint32(len(s.Keys)))
	for range s.Keys {
		b = msgp.AppendNil(b)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
	b = msgp.AppendString(msgp.AppendString(b, "kv_cache_spec_kind"), "full_attention")
	for i := range t.removed {
		b = msgp.AppendMapHeader(b, 4)
		b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockRemoved")
		b = msgp.AppendUint64(msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), 1), uint64(t.removed[i].Keys[0]))
		b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
		b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
	}
	return msgp.AppendInt(b, 0)
}

// fullIndex is an index that follows full engines.
func fullIndex(o IndexOptions, bytes int64) (*prefix.Index, []*indexEngine, error) {
	x, err := prefix.New(prefix.Config{Bytes: bytes})
	if err != nil {
		return nil, nil, err
	}
	var engines []*indexEngine
	var t indexTurn
	for i := range o.Workers {
		e := newIndexEngine(i, uint64(o.held))
		for e.next&(1<<40-1) < e.held {
			e.turn(&t)
			t.tell(e.src, x)
		}
		engines = append(engines, e)
	}
	return x, engines, nil
}

// indexRate measures blocks a second: what is prepared for a piece is not counted.
func indexRate(ctx context.Context, o IndexOptions, engines []*indexEngine, take func(e *indexEngine, turns []indexTurn) (int, time.Duration)) float64 {
	turns := make([]indexTurn, 32)
	blocks, spent := 0, time.Duration(0)
	for i := 0; spent < o.Duration && ctx.Err() == nil; i++ {
		e := engines[i%len(engines)]
		for j := range turns {
			e.turn(&turns[j])
		}
		n, d := take(e, turns)
		blocks, spent = blocks+n, spent+d
	}
	return float64(blocks) / max(spent.Seconds(), 1e-9)
}

func indexEvents(ctx context.Context, o IndexOptions, r *IndexReport) error {
	fmt.Fprintln(o.Progress, "decoded events")
	x, engines, err := fullIndex(o, 1<<30)
	if err != nil {
		return err
	}
	rate := indexRate(ctx, o, engines, func(e *indexEngine, turns []indexTurn) (n int, d time.Duration) {
		began := time.Now()
		for i := range turns {
			n += turns[i].tell(e.src, x)
		}
		return n, time.Since(began)
	})
	r.add(IndexRow{Name: "events", What: fmt.Sprintf("decoded events of %d full caches of %d blocks, stored and removed", o.Workers, o.held), Value: rate, Unit: "blocks/s", Target: 1e6})
	return nil
}

func indexFrames(ctx context.Context, o IndexOptions, r *IndexReport) error {
	fmt.Fprintln(o.Progress, "msgpack frames")
	x, engines, err := fullIndex(o, 1<<30)
	if err != nil {
		return err
	}
	var dec collect.Decoder
	frames := make([][]byte, 0, 64)
	rate := indexRate(ctx, o, engines, func(e *indexEngine, turns []indexTurn) (n int, d time.Duration) {
		frames = frames[:0]
		for i := range turns {
			frames = append(frames, turns[i].frame())
			n += len(turns[i].stored.Keys) + len(turns[i].removed)
		}
		began := time.Now()
		for _, f := range frames {
			if decodeErr := dec.Batch(f, e.src, x); decodeErr != nil {
				err = decodeErr
			}
		}
		return n, time.Since(began)
	})
	r.add(IndexRow{Name: "frames", What: "the same from msgpack as vLLM sends it", Value: rate, Unit: "blocks/s", Target: 300e3})
	return err
}

func indexLookups(ctx context.Context, o IndexOptions, r *IndexReport) error {
	fmt.Fprintln(o.Progress, "lookups")
	for _, workers := range []int{o.Workers, 64, 256} {
		x, _, err := fullIndex(o, 1<<30)
		if err != nil {
			return err
		}
		random := rand.New(rand.NewPCG(7, 7))
		prompt := make([]uint32, o.prompt+1)
		for i := range prompt {
			prompt[i] = random.Uint32N(1 << 17)
		}
		var names []string
		for i := range workers {
			e := newIndexEngine(i, uint64(o.held))
			names = append(names, e.src.Worker)
			b := collect.Stored{Tokens: prompt[:o.prompt], BlockTokens: indexBlock, LoRAID: -1, Medium: "GPU"}
			for k := range o.prompt / indexBlock {
				b.Keys = append(b.Keys, indexKey(1<<60+uint64(k)))
			}
			x.Stored(e.src, &b)
		}
		out := make([]prefix.Match, workers)
		var took []time.Duration
		for began := time.Now(); time.Since(began) < o.Duration/3 && ctx.Err() == nil; {
			at := time.Now()
			x.Lookup(prompt, prefix.Seed{}, names, out)
			took = append(took, time.Since(at))
			if out[workers-1].Tokens != o.prompt {
				return fmt.Errorf("measure lookups: found %+v", out[workers-1])
			}
		}
		if len(took) == 0 {
			return nil
		}
		slices.Sort(took)
		what := fmt.Sprintf("a prompt of %d tokens that %d workers have, beside %d other blocks", o.prompt, workers, o.Workers*o.held)
		r.add(IndexRow{Name: fmt.Sprintf("lookup-%d-p50", workers), What: what, Value: micros(took[len(took)/2]), Unit: "us", Target: 1000, Less: true})
		r.add(IndexRow{Name: fmt.Sprintf("lookup-%d-p99", workers), What: what, Value: micros(took[len(took)*99/100]), Unit: "us", Target: 1000, Less: true})
	}
	return nil
}

// heapInUse is what is in use of the heap once what is not was collected.
func heapInUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// indexChurn goes on beyond the limit, with engines that hold ten times what the index may, and looks at the heap.
func indexChurn(ctx context.Context, o IndexOptions, r *IndexReport) error {
	fmt.Fprintf(o.Progress, "churn at the limit, %v\n", o.Churn)
	var engines []*indexEngine
	for i := range o.Workers {
		engines = append(engines, newIndexEngine(i, uint64(10*o.Bytes/64/int64(o.Workers))))
	}
	var t indexTurn
	engines[0].turn(&t) // its memory is there before
	before := heapInUse()
	x, err := prefix.New(prefix.Config{Bytes: o.Bytes})
	if err != nil {
		return err
	}
	h := &IndexHeap{LimitBytes: o.Bytes}
	began, look := time.Now(), time.Duration(0)
	for i := 0; time.Since(began) < o.Churn && ctx.Err() == nil; i++ {
		e := engines[i%len(engines)]
		e.turn(&t)
		h.Blocks += uint64(t.tell(e.src, x))
		if i%16 == 0 {
			x.Routed("silent", t.stored.Tokens, prefix.Seed{})
			x.Lookup(t.stored.Tokens, prefix.Seed{}, []string{e.src.Worker}, nil)
		}
		if i%100_000 == 99_999 {
			x.Reset(e.src, "churn")
		}
		if time.Since(began) > look {
			look += max(o.Churn/60, 100*time.Millisecond)
			h.HeapBytes, h.SaysBytes = max(h.HeapBytes, heapInUse()-before), max(h.SaysBytes, x.Status().Bytes)
			h.Samples++
		}
	}
	h.HeapBytes, h.SaysBytes = max(h.HeapBytes, heapInUse()-before), max(h.SaysBytes, x.Status().Bytes)
	h.Seconds, h.Evicted = time.Since(began).Seconds(), x.Status().Evicted
	r.Churn = h
	r.add(IndexRow{Name: "heap", What: fmt.Sprintf("the heap's share of the limit, at most, in %.0f s of churn", h.Seconds), Value: float64(h.HeapBytes) / float64(o.Bytes), Unit: "of the limit", Target: 1, Less: true})
	runtime.KeepAlive(x)
	return nil
}

// Failed tells whether a figure misses its target.
func (r *IndexReport) Failed() bool {
	return slices.ContainsFunc(r.Rows, func(row IndexRow) bool { return !row.Met })
}

// figure gives whole numbers for what is large.
func figure(v float64) string {
	if v >= 100 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return f2(v)
}

// PrintIndex writes a report: a table, or with asJSON the document.
func PrintIndex(w io.Writer, r *IndexReport, asJSON bool) error {
	if asJSON {
		return printJSON(w, r)
	}
	var cells [][]string
	for _, row := range r.Rows {
		met := Holds
		if !row.Met {
			met = Fails
		}
		bound := ">="
		if row.Less {
			bound = "<="
		}
		cells = append(cells, []string{row.Name, figure(row.Value), row.Unit, bound + " " + figure(row.Target), met, row.What})
	}
	table(w, "prefix index, blocks of 16 tokens, one core", []string{"", "figure", "", "target", "", ""}, cells)
	if h := r.Churn; h != nil {
		fmt.Fprintf(w, "churn: %d blocks in %.0f s, %d driven out; heap at most %d bytes, the index says %d, limit %d\n", h.Blocks, h.Seconds, h.Evicted, h.HeapBytes, h.SaysBytes, h.LimitBytes)
	}
	m := r.Machine
	_, err := fmt.Fprintf(w, "%d CPUs, load %s before, %s, %s\n", m.CPUs, m.Load1, m.Kernel, m.Go)
	if !r.Complete {
		_, err = fmt.Fprintln(w, "INTERRUPTED: this is what was measured so far")
	}
	return err
}
