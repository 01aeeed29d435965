package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/headrace/headrace/internal/hostmem"
	"github.com/headrace/headrace/transfer"
)

// ModelOptions say what Model measures. The zero value is the whole run.
type ModelOptions struct {
	Transport string             // tcp, shm or all; "" is all
	Models    []string           // names of Geometries; all when empty
	Tokens    []int              // prompt lengths; 512, 2048, 8192 and 32768 when empty
	Memory    int64              // for the KV of both sides; half of what is free when 0
	TFLOPS    float64            // what prefill sustains, for models without a rate; 400 when 0
	Rates     map[string]float64 // prefill tokens a second by model; "" for all
	Rounds    int                // 3 when 0
	Lanes     int
	Child     []string
	Progress  io.Writer
}

// ModelReport is what Model found, one JSON document.
type ModelReport struct {
	Kind        string     `json:"kind"`
	Version     int        `json:"version"`
	Time        time.Time  `json:"time"`
	Seconds     float64    `json:"seconds"`
	Complete    bool       `json:"complete"`
	Rounds      int        `json:"rounds"`
	Machine     Machine    `json:"machine"`
	Submission  string     `json:"submission"`
	Assumptions []string   `json:"assumptions"`
	Rows        []ModelRow `json:"rows"`
	NotMeasured []string   `json:"not_measured"`
}

// ModelRow is one prompt of one model over one transport, medians of the rounds.
type ModelRow struct {
	Model       string  `json:"model"`
	Source      string  `json:"source"`
	Transport   string  `json:"transport"`
	Tokens      int     `json:"tokens"`
	Layers      int     `json:"layers"`
	RunBytes    int64   `json:"run_bytes"` // what lies together: K or V, or the latent vectors, of a block
	Bytes       int64   `json:"bytes"`
	Verified    int64   `json:"verified_bytes"`
	Seconds     float64 `json:"seconds"` // from the first push, with all layers there, until both engines heard that it settled
	GBps        float64 `json:"gb_per_s"`
	PrefillRate float64 `json:"assumed_prefill_tokens_per_s"`
	Prefill     float64 `json:"assumed_prefill_seconds"`
	TTFTAfter   float64 `json:"ttft_after_seconds"` // prefill, then transfer
	ShareAfter  float64 `json:"share_after"`        // the transfer's share of it
	Tail        float64 `json:"tail_seconds"`       // measured: from the end of prefill until settled, each layer pushed when it was due
	TTFTOverlap float64 `json:"ttft_overlapped_seconds"`
	ShareTail   float64 `json:"share_overlapped"`
}

func (o ModelOptions) withDefaults() (ModelOptions, []Geometry, error) {
	if o.Transport == "" {
		o.Transport = "all"
	}
	if !slices.Contains([]string{"all", "tcp", "shm"}, o.Transport) {
		return o, nil, fmt.Errorf("transport %q: choose tcp, shm or all", o.Transport)
	}
	if len(o.Tokens) == 0 {
		o.Tokens = []int{512, 2048, 8192, 32768}
	}
	if o.Memory == 0 {
		o.Memory = cmp.Or(int64(hostmem.Available()), 2<<30) / 2
	}
	if o.TFLOPS == 0 {
		o.TFLOPS = 400
	}
	if o.Rounds == 0 {
		o.Rounds = 3
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	if o.TFLOPS < 0 || o.Rounds < 0 || o.Memory < 0 {
		return o, nil, errors.New("rounds, memory and TFLOP/s cannot be negative")
	}
	for _, n := range o.Tokens {
		if n < 1 || n > 1<<20 {
			return o, nil, fmt.Errorf("prompt of %d tokens: need 1 to %d", n, 1<<20)
		}
	}
	models := slices.Clone(Geometries)
	if len(o.Models) > 0 {
		models = nil
	}
	for _, name := range o.Models {
		g, err := geometry(name)
		if err != nil {
			return o, nil, err
		}
		models = append(models, g)
	}
	for name, rate := range o.Rates {
		if _, err := geometry(name); name != "" && err != nil {
			return o, nil, fmt.Errorf("prefill rate: %w", err)
		}
		if !(rate > 0) {
			return o, nil, fmt.Errorf("prefill rate of %g tokens/s: must be positive", rate)
		}
	}
	return o, models, nil
}

// Check says what is wrong with o, before anything is started.
func (o ModelOptions) Check() error {
	_, _, err := o.withDefaults()
	return err
}

func (o ModelOptions) rate(g Geometry) float64 {
	for _, name := range []string{g.Name, ""} {
		if r := o.Rates[name]; r > 0 {
			return r
		}
	}
	return o.TFLOPS * 1e12 / (2 * g.ActiveB * 1e9)
}

func (o ModelOptions) assumptions() []string {
	return []string{
		fmt.Sprintf("prefill runs at the tokens/s given (--prefill-rate), else at %g TFLOP/s sustained (--tflops) over 2 FLOP a token and active parameter; attention's growth with the prompt is left out", o.TFLOPS),
		"computing is waited for and not done: it takes nothing from the CPUs that transfer, as with an accelerator",
		fmt.Sprintf("blocks of %d tokens, scattered at both ends; each layer is one tensor, K of all blocks before V, as vLLM has it; BF16", modelBlockTokens),
		"TTFT is prefill and transfer alone: no queue, no router, and the lease is bound during prefill",
	}
}

// modelRun is a run of Model over one transport.
type modelRun struct {
	o ModelOptions
	r *ModelReport
	p *pair
}

// Model measures the KV of published models: all layers at once, and layer by layer as they would be computed. When ctx
// ends, the report holds what was measured until then.
func Model(ctx context.Context, o ModelOptions) (*ModelReport, error) {
	o, models, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("bench model: %w", err)
	}
	dir, err := os.MkdirTemp("", "headrace-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	start := time.Now()
	r := &ModelReport{Kind: "headrace.bench.model", Version: 1, Time: start.UTC(), Rounds: o.Rounds, Machine: ThisMachine(), Assumptions: o.assumptions(), Rows: []ModelRow{}, NotMeasured: []string{}}
	prompts, memory := o.prompts(models, r)
	for _, t := range []string{"tcp", "shm"} {
		if err != nil || len(prompts) == 0 || o.Transport != "all" && o.Transport != t {
			continue
		}
		err = o.over(ctx, r, t, dir, prompts, memory)
	}
	r.Seconds = time.Since(start).Seconds()
	if ctx.Err() != nil {
		return r, nil
	}
	r.Complete = err == nil
	return r, err
}

// prompt is a model and a length.
type prompt struct {
	Geometry
	tokens int
}

func (p prompt) blocks() int  { return (p.tokens + modelBlockTokens - 1) / modelBlockTokens }
func (p prompt) bytes() int64 { return p.TokenBytes() * int64(p.blocks()) * modelBlockTokens }

// prompts lists what fits into memory, and what the greatest needs on each side.
func (o ModelOptions) prompts(models []Geometry, r *ModelReport) (list []prompt, memory int64) {
	for _, g := range models {
		for _, n := range o.Tokens {
			p := prompt{g, n}
			if 2*p.bytes() > o.Memory {
				r.NotMeasured = append(r.NotMeasured, fmt.Sprintf("%s, %d tokens: not measured, both sides need %.1f GiB and may take %.1f (--memory)", g.Name, n, gib(2*p.bytes()), gib(o.Memory)))
				continue
			}
			list, memory = append(list, p), max(memory, p.bytes())
		}
	}
	return list, memory
}

func gib(n int64) float64 { return float64(n) / (1 << 30) }

func (o ModelOptions) over(ctx context.Context, r *ModelReport, transport, dir string, prompts []prompt, memory int64) (err error) {
	memory = (memory + 4095) &^ 4095
	rig, err := newRig(ctx, rigOptions{child: o.Child, dir: dir, transport: transport, lanes: o.Lanes, engines: 1, memory: memory})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rig.close()) }()
	m := &modelRun{o: o, r: r, p: rig.pairs[0]}
	for _, p := range prompts {
		row, err := m.measure(ctx, p)
		if err != nil {
			return fmt.Errorf("%s, %d tokens, over %s: %w", p.Name, p.tokens, transport, err)
		}
		row.Transport = transport
		r.Rows = append(r.Rows, row)
		fmt.Fprintf(o.Progress, "%s %d tokens over %s: %.1f ms, %.2f GB/s, %.1f ms after prefill\n", p.Name, p.tokens, transport, row.Seconds*1e3, row.GBps, row.Tail*1e3)
	}
	return nil
}

func (m *modelRun) measure(ctx context.Context, p prompt) (ModelRow, error) {
	row := ModelRow{Model: p.Name, Source: p.Source, Tokens: p.tokens, Layers: p.Layers, RunBytes: p.planeBytes(), Bytes: p.bytes(), PrefillRate: m.o.rate(p.Geometry)}
	row.Prefill = float64(p.tokens) / row.PrefillRate
	layout := p.layout(p.blocks())
	if err := m.p.lend(ctx, layout); err != nil {
		return row, err
	}
	refillBytes(m.p.dst.Bytes()[:p.bytes()], 0xee)
	if _, err := m.once(ctx, 0); err != nil { // warms, too
		return row, err
	}
	var err error
	if row.Verified, err = m.p.verify(); err != nil {
		return row, err
	}
	if m.r.Submission, err = submission(ctx, m.p); err != nil {
		return row, err
	}
	var after, tail []float64
	for range m.o.Rounds {
		t, err := m.once(ctx, 0)
		if err != nil {
			return row, err
		}
		after = append(after, t.Seconds())
		if t, err = m.once(ctx, time.Duration(row.Prefill*1e9)); err != nil {
			return row, err
		}
		tail = append(tail, t.Seconds())
	}
	row.Seconds, row.Tail = median(after), median(tail)
	row.GBps = float64(row.Bytes) / row.Seconds / 1e9
	row.TTFTAfter, row.TTFTOverlap = row.Prefill+row.Seconds, row.Prefill+row.Tail
	row.ShareAfter, row.ShareTail = row.Seconds/row.TTFTAfter, row.Tail/row.TTFTOverlap
	return row, nil
}

// once transfers a prompt whose layers are there one after the other over that time, and says how long after the last
// layer both engines knew that everything had landed.
func (m *modelRun) once(ctx context.Context, prefill time.Duration) (time.Duration, error) {
	f, err := m.p.open(ctx, 0, 1)
	if err != nil {
		return 0, err
	}
	layers := m.p.layout.Layers
	start := time.Now()
	for l := range layers {
		sleep(ctx, time.Until(start.Add(prefill*time.Duration(l+1)/time.Duration(layers))))
		if err := m.p.p.Push(ctx, f.lease, []transfer.Unit{{Layer: l, Count: f.blocks}}, uint64(l)); err != nil {
			return 0, err
		}
	}
	if err := m.p.p.Handoff(ctx, f.lease, nil); err != nil {
		return 0, err
	}
	if err := m.p.settle(ctx, f); err != nil {
		return 0, err
	}
	return time.Since(start.Add(prefill)), nil
}

// PrintModel writes a report: a table, or with asJSON the document.
func PrintModel(w io.Writer, r *ModelReport, asJSON bool) error {
	if asJSON {
		return printJSON(w, r)
	}
	ms := func(s float64) string { return strconv.FormatFloat(s*1e3, 'f', 1, 64) }
	for _, t := range []string{"tcp", "shm"} {
		var cells [][]string
		for _, row := range r.Rows {
			if row.Transport == t {
				cells = append(cells, []string{row.Model, strconv.Itoa(row.Tokens), fmt.Sprintf("%.1f", float64(row.Bytes)/mib), ms(row.Seconds), f2(row.GBps), fmt.Sprintf("%.0f", row.PrefillRate), ms(row.Prefill),
					ms(row.TTFTAfter), fmt.Sprintf("%.1f%%", row.ShareAfter*100), ms(row.TTFTOverlap), fmt.Sprintf("%.1f%%", row.ShareTail*100)})
			}
		}
		table(w, "KV of a prompt over "+t+", layer by layer", []string{"model", "tokens", "MiB", "transfer ms", "GB/s", "assumed tokens/s", "prefill ms", "then transfer ms", "share", "overlapped ms", "share"}, cells)
	}
	fmt.Fprintf(w, "medians of %d rounds; engines speak to daemons by %s\n", r.Rounds, r.Submission)
	for _, line := range slices.Concat(r.Assumptions, r.NotMeasured) {
		fmt.Fprintln(w, line)
	}
	var err error
	if !r.Complete {
		_, err = fmt.Fprintln(w, "INTERRUPTED: this is what was measured so far")
	}
	return err
}
