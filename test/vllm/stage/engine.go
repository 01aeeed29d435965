package stage

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// startLimit is for an engine on a machine that does other things too; alone it takes 30 to 45 seconds.
const startLimit = 5 * time.Minute

// Config is how engines are set up that are to be compared: what they have in common.
type Config struct {
	Model       string   // tiny, windowed or smollm2
	DType       string   // bfloat16
	Blocks      int      // of the KV cache; 1024
	BatchTokens int      // of one step; vLLM's own choice
	Args        []string // others
	Env         []string // of the engines' processes
}

// BlockTokens is the block size of every engine; vLLM's CPU kernels take multiples of 32.
const BlockTokens = 32

// ContextTokens is the longest that a request can become.
const ContextTokens = 2048

// args are vLLM's for this configuration, as every engine is given them, the aggregated one too.
func (c Config) args() []string {
	dtype, blocks := c.DType, c.Blocks
	if dtype == "" {
		dtype = "bfloat16"
	}
	if blocks == 0 {
		blocks = 1024
	}
	args := []string{"--dtype", dtype, "--max-model-len", strconv.Itoa(ContextTokens), "--block-size", strconv.Itoa(BlockTokens),
		"--num-gpu-blocks-override", strconv.Itoa(blocks), "--enable-prefix-caching", "--enforce-eager", "--seed", "0", "--disable-uvicorn-access-log"}
	if c.BatchTokens > 0 {
		args = append(args, "--max-num-batched-tokens", strconv.Itoa(c.BatchTokens))
	}
	return append(args, c.Args...)
}

// Engine is a vLLM server: one that the stage started, or one behind a cluster's router.
type Engine struct {
	Name string
	Addr string // host:port
	// Events and EventsReplay are host:port of its publisher of KV events, "" for none.
	Events, EventsReplay string

	stage *Stage
	env   []string
	argv  []string
	proc  *Process
}

// Plain starts a vLLM without any connector and does not wait for it.
func (s *Stage) Plain(c Config) (*Engine, error) { return s.plain("aggregated", c, nil) }

// Publishing is Plain with KV events, of which the last buffer batches can be replayed.
func (s *Stage) Publishing(c Config, buffer int) (*Engine, error) {
	var ports [2]string
	for i := range ports {
		addr, err := freeAddr()
		if err != nil {
			return nil, err
		}
		_, ports[i], _ = net.SplitHostPort(addr)
	}
	e, err := s.plain("publishing", c, []string{"--kv-events-config", fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%s","replay_endpoint":"tcp://*:%s","buffer_steps":%d,"topic":"kv-events"}`,
		ports[0], ports[1], buffer)})
	if err == nil {
		e.Events, e.EventsReplay = net.JoinHostPort("127.0.0.1", ports[0]), net.JoinHostPort("127.0.0.1", ports[1])
	}
	return e, err
}

func (s *Stage) plain(name string, c Config, more []string) (*Engine, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	argv := append([]string{s.Env.Python(), "-m", "vllm.entrypoints.cli.main", "serve", s.Env.Model(c.Model), "--served-model-name", c.Model,
		"--host", "127.0.0.1", "--port", port}, append(c.args(), more...)...)
	e := &Engine{Name: name, Addr: addr, stage: s, env: c.Env, argv: argv}
	e.proc, err = s.start(name, c.Env, argv...)
	return e, err
}

// Said is the end of the log of an engine that the stage started.
func (e *Engine) Said() string { return Tail(e.proc.Log, 6000) }

// KillAndRestart ends all processes of an engine that the stage started as a crash would, and starts it anew where it was.
// It does not wait for the new one.
func (e *Engine) KillAndRestart() error {
	if err := syscall.Kill(-e.proc.PID(), syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill %s: %w", e.Name, err)
	}
	<-e.proc.done
	var err error
	e.proc, err = e.stage.start(e.Name, e.env, e.argv...)
	return err
}

// freeAddr looks below the ports that the system gives to outgoing connections: an engine takes half a minute until it
// listens, and one of those might be gone by then.
func freeAddr() (string, error) {
	var err error
	for range 100 {
		var l net.Listener
		if l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(12000))); err == nil {
			defer l.Close()
			return l.Addr().String(), nil
		}
	}
	return "", fmt.Errorf("find a free port: %w", err)
}

// URL is where its API is.
func (e *Engine) URL() string { return "http://" + e.Addr + "/v1" }

// Process is the engine's, nil for one that the stage did not start itself.
func (e *Engine) Process() *Process { return e.proc }

// Ready waits until the engine answers.
func (e *Engine) Ready(ctx context.Context) error {
	var fatal error
	err := Poll(ctx, startLimit, func() error {
		if e.proc != nil {
			if fatal = e.proc.ended(); fatal != nil {
				return nil
			}
		}
		_, err := get(ctx, "http://"+e.Addr+"/health")
		return err
	})
	if fatal != nil {
		return fatal
	}
	if err != nil {
		return fmt.Errorf("wait for %s: %w", e.Name, err)
	}
	return nil
}

var pages = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 4}}

func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := pages.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 8<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	return body, err
}

// Metrics are an engine's own, by name and summed over labels; those with reasons also by name{reason}.
type Metrics map[string]float64

// Metrics asks the engine.
func (e *Engine) Metrics(ctx context.Context) (Metrics, error) {
	body, err := get(ctx, "http://"+e.Addr+"/metrics")
	if err != nil {
		return nil, fmt.Errorf("read the metrics of %s: %w", e.Name, err)
	}
	return parseMetrics(string(body)), nil
}

func parseMetrics(text string) Metrics {
	m := Metrics{}
	lines := bufio.NewScanner(strings.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		end := strings.IndexAny(line, "{ ")
		at := strings.LastIndexByte(line, ' ')
		if end <= 0 || at < end || line[0] == '#' {
			continue
		}
		if v, err := strconv.ParseFloat(line[at+1:], 64); err == nil && !math.IsNaN(v) {
			m[line[:end]] += v
			if _, reason, ok := strings.Cut(line[:at], `reason="`); ok {
				reason, _, _ = strings.Cut(reason, `"`)
				m[line[:end]+"{"+reason+"}"] += v
			}
		}
	}
	return m
}

// The figures that say whether an engine still holds something.
const (
	usage   = "vllm:kv_cache_usage_perc"
	running = "vllm:num_requests_running"
	waiting = "vllm:num_requests_waiting"
)

// Idle says what an engine holds, nil for nothing. Nothing is asked of it that could make it step and let go only then.
func (e *Engine) Idle(ctx context.Context) error {
	m, err := e.Metrics(ctx)
	if err != nil {
		return err
	}
	for _, name := range []string{usage, running, waiting} {
		if v, ok := m[name]; !ok || v != 0 {
			return fmt.Errorf("%s: %s is %v, %s %v, %s %v", e.Name, usage, m[usage], running, m[running], waiting, m[waiting])
		}
	}
	return nil
}
