package collect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/headrace/headrace/internal/promtext"
)

// blocksMax bounds what an engine is believed to have, in blocks and in tokens of a block.
const blocksMax = 1 << 40

// Figures are what an engine says of itself. Where it has several data-parallel ranks they are added up.
type Figures struct {
	At               time.Time
	Ranks            int
	Running, Waiting int64
	// Own is how many requests this router had there at that time.
	Own int64
	// KVUsage is the part of the KV cache that requests hold, 0 to 1, of several ranks the mean; -1 when it is not said.
	KVUsage float64

	PrefixQueries, PrefixHits     int64 // tokens
	ExternalQueries, ExternalHits int64 // tokens, of what came from elsewhere
	Preemptions                   int64

	Blocks      int64 // of the KV cache
	BlockTokens int64
	Timing      Timing // zero where nothing was timed yet, or it is not said
}

// Foreign is how many of the engine's requests this router did not give it.
func (f *Figures) Foreign() int64 { return max(f.Running+f.Waiting-f.Own, 0) }

// Spellings of each figure, vLLM's and SGLang's; the first one that an engine has counts. Older vLLM says gpu_, and counters came with and
// without _total.
var (
	namesRunning         = []string{"vllm:num_requests_running", "sglang:num_running_reqs"}
	namesWaiting         = []string{"vllm:num_requests_waiting", "sglang:num_queue_reqs"}
	namesUsage           = []string{"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"}
	namesQueries         = []string{"vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries"}
	namesHits            = []string{"vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits"}
	namesExternalQueries = []string{"vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_queries"}
	namesExternalHits    = []string{"vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_hits"}
	namesPreemptions     = []string{"vllm:num_preemptions_total", "vllm:num_preemptions"}
	namesCache           = []string{"vllm:cache_config_info"}
)

var wanted = func() map[string]bool {
	m := map[string]bool{}
	for _, names := range [][]string{namesRunning, namesWaiting, namesUsage, namesQueries, namesHits, namesExternalQueries, namesExternalHits, namesPreemptions, namesCache,
		namesGapSums, namesGapCounts, namesPrefillSum, namesPrefillCount, namesQueueSum, namesPrompts, namesBySource} {
		for _, n := range names {
			m[n] = true
		}
	}
	return m
}()

// overHTTP fetches metrics from workers. It follows no redirect: only registered workers are dialled.
func overHTTP() (fetch func(ctx context.Context, addr string) (io.ReadCloser, error), closeIdle func()) {
	tr := &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10}
	client := &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return func(ctx context.Context, addr string) (io.ReadCloser, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
		if err != nil {
			return nil, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return nil, err
		}
		if resp.StatusCode != http.StatusOK {
			return nil, errors.Join(fmt.Errorf("GET http://%s/metrics: %s", addr, resp.Status), resp.Body.Close())
		}
		return resp.Body, nil
	}, tr.CloseIdleConnections
}

// scrape looks at the worker's metrics again and again, until its context ends, and calls seen with what it saw.
func (f *follower) scrape(seen func(*Figures)) {
	// The first looks at a fleet that was found all at once are spread, too.
	wait := rand.N(f.c.cfg.Interval / 4)
	for failed := 0; ; {
		timer := time.NewTimer(wait)
		select {
		case <-f.ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		if err := f.look(); err == nil {
			failed = 0
			seen(f.figures.Load())
		} else if f.ctx.Err() == nil {
			failed++
		}
		base := min(f.c.interval()<<min(failed, 8), max(f.c.interval(), backOffMax*f.c.cfg.Interval))
		wait = base - base/8 + rand.N(base/4)
	}
}

// look looks once.
func (f *follower) look() error {
	ctx, cancel := context.WithTimeout(f.ctx, f.c.cfg.Timeout)
	defer cancel()
	own := f.c.cfg.Own(f.w.ID)
	fig, err := f.read(ctx)
	if f.ctx.Err() != nil {
		return f.ctx.Err() // whatever came, nobody follows it any more
	}
	f.looks.Add(1)
	if err != nil {
		text := err.Error()
		old := f.problem.Swap(&text)
		f.failures.Add(1) // behind the problem: whoever sees it counted can read what it was
		if old == nil {
			f.c.cfg.Logger.Info("read a worker's metrics", "worker", f.w.ID, "err", err)
		}
		return err
	}
	f.problem.Store(nil)
	// A request that came or went meanwhile is not taken for another router's.
	fig.At, fig.Own = time.Now(), max(own, f.c.cfg.Own(f.w.ID))
	f.figures.Store(fig)
	return nil
}

func (f *follower) read(ctx context.Context) (*Figures, error) {
	body, err := f.c.cfg.Fetch(ctx, f.w.Addr)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return readFigures(body)
}

// readFigures reads metrics in Prometheus' text format. What is of no interest is not parsed.
func readFigures(r io.Reader) (*Figures, error) {
	fs := families{}
	err := promtext.Read(r, func(name []byte) bool { return wanted[string(name)] }, func(s promtext.Sample) { fs[s.Name] = append(fs[s.Name], s) })
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	return figures(fs)
}

// families are samples by their names.
type families map[string][]promtext.Sample

// sum adds up the ranks' values of the first spelling there is.
func (fs families) sum(names []string) (sum float64, n int) {
	for _, name := range names {
		for _, s := range fs[name] {
			if math.IsNaN(s.Value) || math.IsInf(s.Value, 0) || s.Value < 0 {
				continue
			}
			sum += s.Value
			n++
		}
		if n > 0 {
			break
		}
	}
	return sum, n
}

func (fs families) count(names []string) int64 {
	v, _ := fs.sum(names)
	return int64(min(v, 1<<62))
}

func figures(fs families) (*Figures, error) {
	f := &Figures{KVUsage: -1, Running: fs.count(namesRunning), Waiting: fs.count(namesWaiting),
		PrefixQueries: fs.count(namesQueries), PrefixHits: fs.count(namesHits),
		ExternalQueries: fs.count(namesExternalQueries), ExternalHits: fs.count(namesExternalHits), Preemptions: fs.count(namesPreemptions), Timing: fs.timing()}
	_, running := fs.sum(namesRunning)
	usage, n := fs.sum(namesUsage)
	if n > 0 {
		f.KVUsage = min(usage/float64(n), 1)
	}
	if running == 0 && n == 0 {
		return nil, errors.New("read metrics: none of vLLM's or SGLang's (vllm:num_requests_running, sglang:num_running_reqs)")
	}
	f.Ranks = max(running, 1)
	for _, s := range fs[namesCache[0]] {
		f.Blocks += blockNumber(s.Labels["num_gpu_blocks"])
		f.BlockTokens = max(f.BlockTokens, blockNumber(s.Labels["block_size"]))
	}
	return f, nil
}

// blockNumber reads a number of blocks or tokens; 0 for what is none, as "None" before the cache was sized.
func blockNumber(text string) int64 {
	v, err := strconv.ParseInt(text, 10, 64)
	if err != nil || v < 0 || v > blocksMax {
		return 0
	}
	return v
}
