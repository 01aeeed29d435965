// Package worker is the reference engine as a process: it loads a model, lends its KV cache to the node daemon, runs
// the engine's loop and serves it over HTTP. The parts are in the packages below it; this one only puts them together.
// It must not know the registry or the router: who runs it announces it.
package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/internal/hostmem"
	"github.com/headrace/headrace/internal/memfd"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/nodeclient"
	"github.com/headrace/headrace/worker/api"
	"github.com/headrace/headrace/worker/engine"
	"github.com/headrace/headrace/worker/kvevents"
	"github.com/headrace/headrace/worker/model"
	"github.com/headrace/headrace/worker/tokenizer"
)

// Config describes a worker. Zero values take the defaults named beside the fields.
type Config struct {
	ID             string // engine id at the daemon and in the registry
	Role           string // prefill, decode or both: what the router should use it for; any worker serves whole requests too (both)
	ModelPath      string
	ModelName      string // as clients name it (the file's name without extension and quantization: Model-1B.Q4_1.gguf is Model-1B)
	Listener       net.Listener
	Socket         string // the node daemon's; "" for none
	Threads        int    // all cores
	KVBytes        uint64 // 512 MiB
	HugePages      bool   // for the KV cache; they must be free
	BlockTokens    int    // 16
	TensorParallel int    // ranks the key heads are divided over, each with memory of its own (1)
	BatchTokens    int    // 128
	BodyMax        int64  // of a request, bytes (32 MiB and a little, what the router lets through)
	// Events and EventsReplay are where KV events are published and replayed (nil: they are not). Both or none; Run closes them.
	Events, EventsReplay net.Listener
	Logger               *slog.Logger

	// OnReady is called once, when requests are served. OnNode is called whenever the daemon came or went (nil).
	OnReady func(Info)
	OnNode  func(*nodeclient.Info)
}

// Info is what a running worker is announced with.
type Info struct {
	Model       string
	Addr        string
	Fingerprint [32]byte
	BlockTokens int
	Blocks      int
	Context     int
	Ranks       int // tensor-parallel
}

func (c *Config) defaults() error {
	switch c.Role {
	case "":
		c.Role = "both"
	case "prefill", "decode", "both":
	default:
		return fmt.Errorf("role %q: use prefill, decode or both", c.Role)
	}
	if c.ModelPath == "" {
		return errors.New("no model file given")
	}
	if c.ModelName == "" {
		c.ModelName = modelName(c.ModelPath)
	}
	if c.KVBytes == 0 {
		c.KVBytes = 512 << 20
	}
	if c.BlockTokens == 0 {
		c.BlockTokens = 16
	}
	if c.TensorParallel == 0 {
		c.TensorParallel = 1
	}
	if c.BodyMax == 0 {
		c.BodyMax = 33 << 20
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

var quantization = regexp.MustCompile(`(?i)[.-](F32|F16|BF16|I?Q[0-9][0-9A-Z_]*)$`)

// modelName is what people call the model in a file named by the habits of GGUF.
func modelName(path string) string {
	base := strings.TrimSuffix(filepath.Base(path), ".gguf")
	if short := quantization.ReplaceAllString(base, ""); short != "" {
		return short
	}
	return base
}

// worker holds what Run opens, in that order.
type worker struct {
	cfg    Config
	model  *model.Model
	tok    *tokenizer.Tokenizer
	tmpl   *chat.Template
	cache  *model.Cache
	memory []*memfd.Memory     // one a tensor-parallel rank
	events *kvevents.Publisher // nil for none
	engine *engine.Engine
}

// Run serves until ctx ends or something breaks. Everything is closed when it returns.
func Run(ctx context.Context, cfg Config) (err error) {
	if err := cfg.defaults(); err != nil {
		return err
	}
	w := &worker{cfg: cfg}
	defer func() { err = errors.Join(err, w.close()) }()
	started := time.Now()
	if err := w.open(); err != nil {
		return err
	}
	cfg.Logger.Info("model is loaded", "model", cfg.ModelName, "kernel", w.model.KernelName(), "threads", w.model.Threads(),
		"blocks", w.cache.Blocks, "block_tokens", w.cache.BlockTokens, "tensor_parallel", len(w.cache.Shards), "took", time.Since(started).Round(time.Millisecond))

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	if cfg.Socket != "" {
		running.Go(func() { w.engine.Link().Run(ctx, w.dial, w.nodeChanged) })
	}
	return w.serve(ctx)
}

func (w *worker) open() error {
	var err error
	if w.model, err = model.Load(w.cfg.ModelPath, model.Options{Threads: w.cfg.Threads}); err != nil {
		return fmt.Errorf("load model: %w", err)
	}
	if w.tok, err = tokenizer.New(w.model.File()); err != nil {
		return fmt.Errorf("load tokenizer of %s: %w", w.cfg.ModelPath, err)
	}
	if w.tmpl, err = openTemplate(w.model, w.tok); err != nil {
		return err
	}
	if err := w.allocate(); err != nil {
		return err
	}
	info := api.ModelInfo{
		ID: w.cfg.ModelName, Created: time.Now(),
		Context: min(w.model.Context, w.cache.Blocks*w.cache.BlockTokens), Vocab: w.model.Vocab,
		EndTokens: w.tok.EndTokens(), BlockTokens: w.cache.BlockTokens, Blocks: w.cache.Blocks,
	}
	cfg := engine.Config{
		Model: w.model, Info: info, Role: w.cfg.Role, Cache: w.cache,
		BatchTokens: w.cfg.BatchTokens, Logger: w.cfg.Logger,
	}
	if w.cfg.Events != nil {
		w.events = kvevents.New(w.cfg.Events, w.cfg.EventsReplay, w.cache.BlockTokens, w.cfg.Logger)
		cfg.Events = w.events
	}
	w.engine, err = engine.New(cfg)
	return err
}

// openTemplate compiles the file's own chat template; a file without one serves completions only.
func openTemplate(m *model.Model, tok *tokenizer.Tokenizer) (*chat.Template, error) {
	source, ok := m.File().String("tokenizer.chat_template")
	if !ok {
		return nil, nil
	}
	text := func(id int32, ok bool) string {
		if !ok {
			return ""
		}
		return string(tok.TokenBytes(id))
	}
	return chat.New(source, chat.Options{BOS: text(tok.BOS()), EOS: text(tok.EOS())})
}

// allocate makes the KV cache in memory that can be lent, in one piece for each tensor-parallel rank.
func (w *worker) allocate() error {
	ranks := w.cfg.TensorParallel
	floats, err := w.model.ShardFloats(1, w.cfg.BlockTokens, ranks)
	if err != nil {
		return fmt.Errorf("%d tensor-parallel ranks, %d tokens a block: %w", ranks, w.cfg.BlockTokens, err)
	}
	perBlock := uint64(floats) * 4
	blocks := int(w.cfg.KVBytes / uint64(ranks) / perBlock)
	if blocks < 2 {
		return fmt.Errorf("allocate KV cache: %d bytes hold %d blocks of %d tokens (%d bytes each in each of %d ranks); give at least two blocks",
			w.cfg.KVBytes, blocks, w.cfg.BlockTokens, perBlock, ranks)
	}
	if err := hostmem.Check("KV cache", uint64(blocks)*perBlock*uint64(ranks), "--kv-memory"); err != nil {
		return err
	}
	var shards [][]float32
	for rank := range ranks {
		create := memfd.Create
		if w.cfg.HugePages {
			create = memfd.CreateHuge
		}
		m, err := create(fmt.Sprintf("headrace-kv-%d", rank), uint64(blocks)*perBlock)
		if err != nil {
			return fmt.Errorf("allocate KV cache: %w", err)
		}
		w.memory = append(w.memory, m)
		shards = append(shards, m.Float32s()[:blocks*floats])
	}
	w.cache, err = w.model.CacheOver(blocks, w.cfg.BlockTokens, shards)
	return err
}

// layout describes a shard as package model lays it out: [layer][block][K, V][token][head][dimension] of F32.
func (w *worker) layout(rank int) transfer.Layout {
	c, s, head := w.cache, &w.cache.Shards[rank], uint64(w.model.HeadDim)*4
	token := head * uint64(s.HeadCount)
	plane := token * uint64(c.BlockTokens)
	return transfer.Layout{
		Fingerprint: w.model.Fingerprint, DType: transfer.F32,
		Layers: uint32(c.Layers), Blocks: uint32(c.Blocks), BlockTokens: uint32(c.BlockTokens), Planes: 2,
		Heads: uint32(s.HeadCount), HeadFirst: uint32(s.HeadFirst), HeadsTotal: uint32(w.model.KVHeads), HeadBytes: uint32(head),
		TPRank: uint32(rank), TPSize: uint32(len(c.Shards)),
		LayerStride: 2 * plane * uint64(c.Blocks), BlockStride: 2 * plane, PlaneStride: plane, TokenStride: token, HeadStride: head,
	}
}

// daemon fits the client to what the loop needs.
type daemon struct{ *nodeclient.Client }

func (d daemon) NodeID() string { return d.Info().NodeID }
func (d daemon) Epoch() uint64  { return d.Info().Epoch }

func (w *worker) dial(ctx context.Context, onEvent func(transfer.Event)) (engine.Daemon, []transfer.RegionID, error) {
	c, err := nodeclient.Dial(ctx, w.cfg.Socket, nodeclient.Options{EngineID: w.cfg.ID, OnEvent: onEvent, Logger: w.cfg.Logger})
	if err != nil {
		if errors.Is(err, nodeclient.ErrVersion) {
			err = fmt.Errorf("%w: %w", engine.ErrVersion, err)
		}
		return nil, nil, err
	}
	var regions []transfer.RegionID
	for rank, m := range w.memory {
		region, err := c.RegisterRegion(ctx, m.FD(), m.Size(), w.layout(rank))
		if err != nil {
			return nil, nil, errors.Join(fmt.Errorf("lend the KV cache: %w", err), c.Close())
		}
		regions = append(regions, region)
	}
	return daemon{c}, regions, nil
}

func (w *worker) nodeChanged(d engine.Daemon) {
	if w.cfg.OnNode == nil {
		return
	}
	if d == nil {
		w.cfg.OnNode(nil)
		return
	}
	info := d.(daemon).Info()
	w.cfg.OnNode(&info)
}

func (w *worker) info() Info {
	m := w.engine.Model()
	return Info{
		Model: m.ID, Addr: w.cfg.Listener.Addr().String(), Fingerprint: w.model.Fingerprint,
		BlockTokens: m.BlockTokens, Blocks: m.Blocks, Context: m.Context,
		Ranks: len(w.cache.Shards),
	}
}

// close closes in reverse order of opening.
func (w *worker) close() error {
	var errs []error
	if w.engine != nil {
		w.engine.Close()
	}
	if w.events != nil {
		errs = append(errs, w.events.Close())
	}
	for _, m := range w.memory {
		errs = append(errs, m.Close())
	}
	if w.model != nil {
		errs = append(errs, w.model.Close())
	}
	return errors.Join(errs...)
}
