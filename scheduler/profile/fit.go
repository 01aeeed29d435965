package profile

import (
	"errors"
	"fmt"
	"math"

	"gonum.org/v1/gonum/mat"
	"gonum.org/v1/gonum/stat"
)

// Fit is what steps of an engine take, as scheduler/sim reckons them.
type Fit struct {
	// Prefill: microseconds of a step, of each prompt token, and of each pair of a computed token and one before it, with so many
	// tokens of a prompt in a step.
	PrefillStepUs   float64 `json:"prefill_step_us"`
	PromptTokenUs   float64 `json:"prompt_token_us"`
	PromptAttention float64 `json:"prompt_attention_ps"`
	ChunkTokens     int     `json:"chunk_tokens"`
	// Decode: of a step, of each stream, and of each token in their KV cache.
	DecodeStepUs float64 `json:"decode_step_us"`
	StreamUs     float64 `json:"stream_us"`
	KVTokenNs    float64 `json:"kv_token_ns"`
	// By how much the fit is off what was measured: the root of the mean square, and the most, as parts of it.
	PrefillOff  float64 `json:"prefill_off"`
	PrefillMost float64 `json:"prefill_off_most"`
	DecodeOff   float64 `json:"decode_off"`
	DecodeMost  float64 `json:"decode_off_most"`
	// Jitter is how much rounds differ, as a half width.
	Jitter float64 `json:"jitter"`
}

func (f *Fit) ttft(prompt, cached int) float64 {
	chunks, pairs := steps(prompt, cached, f.ChunkTokens)
	return (f.PrefillStepUs*chunks + f.PromptTokenUs*float64(prompt-cached) + f.PromptAttention*1e-6*pairs) / 1e3
}

func (f *Fit) itl(streams, context float64) float64 {
	return (f.DecodeStepUs + f.StreamUs*streams + f.KVTokenNs*1e-3*streams*context) / 1e3
}

// steps are how many a prompt takes, and the pairs of a computed token and one before it.
func steps(prompt, cached, chunk int) (n, pairs float64) {
	for at := cached; at < prompt; {
		k := min(chunk, prompt-at)
		pairs += float64(k) * (float64(at) + float64(k)/2)
		at += k
		n++
	}
	return n, pairs
}

func fit(points []Point, chunk int) (*Fit, error) {
	f := &Fit{}
	if err := f.fitPrefill(points, chunk); err != nil {
		return nil, err
	}
	if err := f.fitDecode(points); err != nil {
		return nil, err
	}
	var spread []float64
	for _, p := range points {
		if p.Rounds > 1 && p.Ms > 0 {
			spread = append(spread, (p.High-p.Low)/2/p.Ms)
		}
	}
	if len(spread) > 0 {
		f.Jitter = math.Min(stat.Mean(spread, nil), 0.15) // the most that a timing table takes
	}
	return f, nil
}

const (
	chunkLeast = 64
	chunkMost  = 1 << 16
	// A larger chunk is taken when it fits hardly worse: within this share of the fit's error, or within this error of the measurement.
	chunkTies = 0.02
	chunkFine = 1e-4
)

// fitPrefill tries chunks of all powers of two up to the longest prompt, where none is given.
func (f *Fit) fitPrefill(points []Point, chunk int) error {
	var list []Point
	longest := 0
	for _, p := range points {
		if p.Kind == Prefill {
			list = append(list, p)
			longest = max(longest, p.Prompt)
		}
	}
	if len(list) < 2 {
		return fmt.Errorf("%d prefill points were measured; two are the least", len(list))
	}
	tries := []int{chunk}
	if chunk == 0 {
		tries = nil
		for n := chunkLeast; n <= chunkMost; n *= 2 {
			if tries = append(tries, n); n >= longest {
				break
			}
		}
	}
	best := math.Inf(1)
	for _, n := range tries {
		rows, y := make([][]float64, len(list)), make([]float64, len(list))
		for i, p := range list {
			chunks, pairs := steps(p.Prompt, p.Cached, n)
			rows[i], y[i] = []float64{chunks, float64(p.Prompt - p.Cached), pairs}, p.Ms*1e3
		}
		c, off, most, err := least(rows, y)
		if err != nil {
			return fmt.Errorf("prefill: %w", err)
		}
		if c[0] <= 0 {
			c[0] = 1 // a step takes something
		}
		if off <= best*(1+chunkTies) || off < chunkFine {
			best = math.Min(best, off)
			f.PrefillStepUs, f.PromptTokenUs, f.PromptAttention, f.ChunkTokens = c[0], c[1], c[2]*1e6, n
			f.PrefillOff, f.PrefillMost = off, most
		}
	}
	return nil
}

func (f *Fit) fitDecode(points []Point) error {
	var rows [][]float64
	var y []float64
	for _, p := range points {
		if p.Kind == Decode {
			rows = append(rows, []float64{1, float64(p.Streams), float64(p.Streams) * p.Mean})
			y = append(y, p.Ms*1e3)
		}
	}
	if len(rows) < 1 {
		return errors.New("no decode point was measured")
	}
	c, off, most, err := least(rows, y)
	if err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	if c[0] <= 0 {
		c[0] = 1
	}
	f.DecodeStepUs, f.StreamUs, f.KVTokenNs, f.DecodeOff, f.DecodeMost = c[0], c[1], c[2]*1e3, off, most
	return nil
}

// least finds coefficients, none of them below 0, with the least squares of relative errors. Columns leave one by one, the most negative first;
// and the last ones where there are fewer rows than columns.
func least(rows [][]float64, y []float64) (c []float64, off, most float64, err error) {
	columns := []int{}
	for k := range min(len(rows[0]), len(rows)) {
		columns = append(columns, k)
	}
	c = make([]float64, len(rows[0]))
	for len(columns) > 0 {
		var v []float64
		if v, err = solve(rows, y, columns); err != nil {
			columns = columns[:len(columns)-1] // they say the same twice: the simpler ones stay
			continue
		}
		lowest := 0
		for i := range v {
			if v[i] < v[lowest] {
				lowest = i
			}
		}
		if v[lowest] < 0 {
			columns = append(columns[:lowest:lowest], columns[lowest+1:]...)
			continue
		}
		for i, k := range columns {
			c[k] = v[i]
		}
		break
	}
	if len(columns) == 0 {
		return nil, 0, 0, errors.New("times do not grow with what is computed: nothing can be fitted")
	}
	for i, row := range rows {
		said := 0.0
		for k := range row {
			said += c[k] * row[k]
		}
		e := math.Abs(said/y[i] - 1)
		off += e * e
		most = math.Max(most, e)
	}
	return c, math.Sqrt(off / float64(len(rows))), most, nil
}

// solve scales each column to 1 at most: pairs of tokens are many.
func solve(rows [][]float64, y []float64, columns []int) ([]float64, error) {
	scale := make([]float64, len(columns))
	for i, k := range columns {
		for j, row := range rows {
			scale[i] = math.Max(scale[i], math.Abs(row[k]/y[j]))
		}
		if scale[i] == 0 {
			return nil, errors.New("a column of nothing")
		}
	}
	a, b := mat.NewDense(len(rows), len(columns), nil), mat.NewDense(len(rows), 1, nil)
	for j, row := range rows {
		for i, k := range columns {
			a.Set(j, i, row[k]/y[j]/scale[i])
		}
		b.Set(j, 0, 1)
	}
	var x mat.Dense
	if err := x.Solve(a, b); err != nil {
		return nil, err
	}
	v := make([]float64, len(columns))
	for i := range v {
		v[i] = x.At(i, 0) / scale[i]
	}
	return v, nil
}
