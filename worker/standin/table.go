package standin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"github.com/knadh/koanf/parsers/yaml"
)

// Table is how long an engine's steps take, and how much it holds. Its file is YAML or JSON with these names.
type Table struct {
	BlockTokens   int `json:"block_tokens"`
	Blocks        int `json:"blocks"`
	Context       int `json:"context"`         // longest prompt and answer together, tokens
	BatchTokens   int `json:"batch_tokens"`    // of a step
	StreamsMax    int `json:"streams_max"`     // that hold blocks at once
	WaitingMax    int `json:"waiting_max"`     // more are refused
	BytesPerToken int `json:"bytes_per_token"` // of a prompt that is text
	// AnswerTokens is how long answers are in the mean that are not cut off by max_tokens before, each between half and
	// one and a half of it; 0: they go on until max_tokens.
	AnswerTokens int `json:"answer_tokens"`

	// Prefill has the seconds of a step that computes so many prompt tokens, by tokens. Between two rows, and behind the
	// last one, it is linear.
	Prefill []PrefillRow `json:"prefill"`
	// PrefillContextSeconds comes on top for each new token and each token of context before it: attention.
	PrefillContextSeconds float64 `json:"prefill_context_seconds"`
	// Decode has the seconds of a step that gives each of so many streams a token, at a mean context: a whole grid, each
	// number of streams with the same contexts. It is linear in both, also behind the last ones.
	Decode []DecodeRow `json:"decode"`

	KVBytesPerToken        float64 `json:"kv_bytes_per_token"`
	TransferBytesPerSecond float64 `json:"transfer_bytes_per_second"` // out of one engine, all its transfers together
	TransferSetupSeconds   float64 `json:"transfer_setup_seconds"`    // of each transfer
}

// PrefillRow is one measurement.
type PrefillRow struct {
	Tokens  int     `json:"tokens"`
	Seconds float64 `json:"seconds"`
}

// DecodeRow is one measurement.
type DecodeRow struct {
	Streams int     `json:"streams"`
	Context int     `json:"context"`
	Seconds float64 `json:"seconds"`
}

// DefaultTable is reckoned, not measured: a model of 8 billion parameters in 16 bits, with 8 KV heads of 128 in 32
// layers (128 KiB a token), on a GPU of 48 GB with 864 GB/s of memory and 362 TFLOPS: decoding reads 16 GB of weights and
// the contexts at the memory's rate, prefill computes 16 GFLOP a token at 45 % of the peak, and KV leaves over 25 Gbit/s.
func DefaultTable() Table {
	const step, perStream, perContext = 0.0186, 0.00008, 131072 / 864e9
	t := Table{
		BlockTokens: 16, Blocks: 12288, Context: 131072, BatchTokens: 2048, StreamsMax: 256, WaitingMax: 4096, BytesPerToken: 1, AnswerTokens: 256,
		Prefill:               []PrefillRow{{0, 0}, {1, 0.019}, {128, 0.024}, {512, 0.052}, {2048, 0.2}},
		PrefillContextSeconds: 8e-10,
		KVBytesPerToken:       131072, TransferBytesPerSecond: 2.9e9, TransferSetupSeconds: 0.0005,
	}
	for _, streams := range []int{1, 16, 64, 256} {
		for _, context := range []int{0, 4096, 32768} {
			t.Decode = append(t.Decode, DecodeRow{streams, context, step + float64(streams)*(perStream+float64(context)*perContext)})
		}
	}
	return t
}

// LoadTable reads a file; what it does not say is as in DefaultTable.
func LoadTable(path string) (Table, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return Table{}, fmt.Errorf("read timing table: %w", err)
	}
	t, err := ParseTable(b)
	if err != nil {
		return Table{}, fmt.Errorf("read timing table %s: %w", path, err)
	}
	return t, nil
}

// ParseTable reads YAML, of which JSON is a part.
func ParseTable(b []byte) (Table, error) {
	doc, err := yaml.Parser().Unmarshal(b)
	if err != nil {
		return Table{}, err
	}
	plain, err := json.Marshal(doc)
	if err != nil {
		return Table{}, err
	}
	t := DefaultTable()
	if doc["prefill"] != nil {
		t.Prefill = nil
	}
	if doc["decode"] != nil {
		t.Decode = nil
	}
	d := json.NewDecoder(bytes.NewReader(plain))
	d.DisallowUnknownFields()
	if err := d.Decode(&t); err != nil {
		return Table{}, err
	}
	return t, t.Check()
}

// Check says what is wrong with the table, and sorts its rows.
func (t *Table) Check() error {
	for _, f := range []struct {
		name     string
		v        int
		min, max int
	}{
		{"block_tokens", t.BlockTokens, 1, 4096}, {"blocks", t.Blocks, 2, 1 << 24}, {"context", t.Context, 2, 1 << 26},
		{"batch_tokens", t.BatchTokens, 1, 1 << 24}, {"streams_max", t.StreamsMax, 1, 1 << 20}, {"waiting_max", t.WaitingMax, 0, 1 << 20},
		{"bytes_per_token", t.BytesPerToken, 1, 64}, {"answer_tokens", t.AnswerTokens, 0, 1 << 24},
	} {
		if f.v < f.min || f.v > f.max {
			return fmt.Errorf("%s is %d, it must be %d to %d", f.name, f.v, f.min, f.max)
		}
	}
	for _, f := range []struct {
		name string
		v    float64
	}{
		{"prefill_context_seconds", t.PrefillContextSeconds}, {"kv_bytes_per_token", t.KVBytesPerToken}, {"transfer_setup_seconds", t.TransferSetupSeconds},
	} {
		if !seconds(f.v) {
			return fmt.Errorf("%s is %v: it cannot be negative or without end", f.name, f.v)
		}
	}
	if !(t.TransferBytesPerSecond > 0) {
		return errors.New("transfer_bytes_per_second must be over 0")
	}
	slices.SortFunc(t.Prefill, func(a, b PrefillRow) int { return cmp.Compare(a.Tokens, b.Tokens) })
	slices.SortFunc(t.Decode, func(a, b DecodeRow) int {
		return cmp.Or(cmp.Compare(a.Streams, b.Streams), cmp.Compare(a.Context, b.Context))
	})
	return errors.Join(t.checkPrefill(), t.checkDecode())
}

// seconds tells whether a figure of a table can be a time, or a factor of one.
func seconds(v float64) bool { return v >= 0 && v <= math.MaxFloat32 }

func (t *Table) checkPrefill() error {
	if len(t.Prefill) == 0 {
		return errors.New("prefill has no rows")
	}
	for i, r := range t.Prefill {
		switch {
		case r.Tokens < 0 || !seconds(r.Seconds):
			return fmt.Errorf("prefill: %d tokens in %v s", r.Tokens, r.Seconds)
		case i > 0 && (r.Tokens == t.Prefill[i-1].Tokens || r.Seconds < t.Prefill[i-1].Seconds):
			return fmt.Errorf("prefill: %d tokens twice, or in less time than fewer", r.Tokens)
		}
	}
	return nil
}

func (t *Table) checkDecode() error {
	if len(t.Decode) == 0 {
		return errors.New("decode has no rows")
	}
	contexts := t.contexts()
	if len(t.Decode)%contexts != 0 {
		return errors.New("decode is no whole grid: give each number of streams the same contexts")
	}
	for i, r := range t.Decode {
		first := t.Decode[i/contexts*contexts]
		switch {
		case r.Streams < 1 || r.Context < 0 || !seconds(r.Seconds):
			return fmt.Errorf("decode: %d streams of %d tokens in %v s", r.Streams, r.Context, r.Seconds)
		case r.Streams != first.Streams || r.Context != t.Decode[i%contexts].Context:
			return errors.New("decode is no whole grid: give each number of streams the same contexts")
		case i%contexts > 0 && r.Context == t.Decode[i-1].Context:
			return fmt.Errorf("decode: %d streams of %d tokens are there twice", r.Streams, r.Context)
		}
	}
	return nil
}

// contexts is how many rows a number of streams has.
func (t *Table) contexts() int {
	n := 1
	for n < len(t.Decode) && t.Decode[n].Streams == t.Decode[0].Streams {
		n++
	}
	return n
}

// prefillSeconds is how long a step takes that computes tokens, pairs of which with what stands before them are computed.
func (t *Table) prefillSeconds(tokens int, pairs float64) float64 {
	if tokens == 0 {
		return 0
	}
	i := at(len(t.Prefill), func(i int) int { return t.Prefill[i].Tokens }, tokens)
	s := t.Prefill[i].Seconds
	if i+1 < len(t.Prefill) {
		a, b := t.Prefill[i], t.Prefill[i+1]
		s = line(float64(a.Tokens), a.Seconds, float64(b.Tokens), b.Seconds, float64(tokens))
	} else if a := t.Prefill[i]; a.Tokens > 0 {
		s *= float64(tokens) / float64(a.Tokens)
	}
	return s + pairs*t.PrefillContextSeconds
}

// decodeSeconds is how long a step takes that gives each of so many streams a token.
func (t *Table) decodeSeconds(streams int, context float64) float64 {
	if streams == 0 {
		return 0
	}
	n := t.contexts()
	row := at(len(t.Decode)/n, func(i int) int { return t.Decode[i*n].Streams }, streams)
	s := t.decodeRow(row*n, n, context)
	if (row+1)*n < len(t.Decode) {
		s = line(float64(t.Decode[row*n].Streams), s, float64(t.Decode[(row+1)*n].Streams), t.decodeRow((row+1)*n, n, context), float64(streams))
	}
	return max(s, 0)
}

// decodeRow is the time by context for one number of streams.
func (t *Table) decodeRow(from, n int, context float64) float64 {
	i := from + at(n, func(i int) int { return t.Decode[from+i].Context }, int(context))
	if i+1 == from+n {
		return t.Decode[i].Seconds
	}
	a, b := t.Decode[i], t.Decode[i+1]
	return line(float64(a.Context), a.Seconds, float64(b.Context), b.Seconds, context)
}

// at is the row before x to draw a line from: of the last two where x is behind them.
func at(n int, of func(int) int, x int) int {
	i := 0
	for i+2 < n && of(i+1) <= x {
		i++
	}
	return i
}

func line(x0, y0, x1, y1, x float64) float64 { return y0 + (y1-y0)*(x-x0)/(x1-x0) }

func duration(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
