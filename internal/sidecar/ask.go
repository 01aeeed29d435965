package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"syscall"

	"github.com/headrace/headrace/internal/promtext"
)

// answerBytesMax bounds what an engine may answer.
const answerBytesMax = promtext.BytesMax

// Asker asks an engine's HTTP server what it is and how it does.
type Asker struct {
	Base   string // http://host:port
	Client *http.Client
}

// Figures are what an engine's /metrics say. Fields that it does not tell are -1, and "" or 0 in what it is.
type Figures struct {
	Running    float64
	Waiting    float64
	CacheUsage float64 // 0 to 1

	BlockTokens uint32
	Blocks      uint32
	CacheDType  string
	Started     float64 // Unix seconds
	Steps       float64 // made so far; -1 where they are not counted
}

// lorasMax bounds the adapters that are listed of one engine.
const lorasMax = 256

// Self is what an engine says of itself.
type Self struct {
	Model         string
	ContextTokens uint32
	Version       string // "" where there is no /version
	Engine        string // its name and version, "" where it is not said
	Connector     Connector
	LoRAs         []string // adapters of that model
	Figures
}

// errStatus is an answer other than 200.
type errStatus struct {
	path string
	code int
	body string
}

func (e *errStatus) Error() string {
	text := fmt.Sprintf("%s: %d %s", e.path, e.code, http.StatusText(e.code))
	if e.body != "" {
		text += ": " + e.body
	}
	return text
}

func (a *Asker) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.Base+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := a.Client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, answerBytesMax))
	if err != nil {
		return nil, fmt.Errorf("GET %s: %w", path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, &errStatus{path, resp.StatusCode, firstLine(body)}
	}
	return body, nil
}

func firstLine(body []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(body)), "\n")
	if len(line) > 200 {
		line = line[:200] + "..."
	}
	return line
}

// Health is nil when the engine says that it is well.
func (a *Asker) Health(ctx context.Context) error {
	_, err := a.get(ctx, "/health")
	return err
}

// gone tells an engine that cannot be reached or says that it is ill from one that is merely slow to answer.
func gone(err error) bool {
	return errors.As(err, new(*errStatus)) || errors.Is(err, errStalled) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF)
}

// missing tells that the engine has no such page.
func missing(err error) bool {
	e := new(errStatus)
	return errors.As(err, &e) && (e.code == http.StatusNotFound || e.code == http.StatusMethodNotAllowed)
}

// Self asks for everything. An engine must have /v1/models; /version and /metrics are vLLM's.
func (a *Asker) Self(ctx context.Context) (*Self, error) {
	s := &Self{}
	body, err := a.get(ctx, "/v1/models")
	if err != nil {
		return nil, err
	}
	var models struct {
		Data []struct {
			ID          string `json:"id"`
			MaxModelLen int64  `json:"max_model_len"`
			Parent      string `json:"parent"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &models); err != nil {
		return nil, fmt.Errorf("read /v1/models: %w", err)
	}
	for _, m := range models.Data {
		if m.ID != "" && m.Parent != "" && len(s.LoRAs) < lorasMax {
			s.LoRAs = append(s.LoRAs, m.ID)
		}
		if m.ID != "" && m.Parent == "" && s.Model == "" { // adapters have a parent
			s.Model = m.ID
			if m.MaxModelLen > 0 && m.MaxModelLen < 1<<32 {
				s.ContextTokens = uint32(m.MaxModelLen)
			}
		}
	}
	if s.Model == "" {
		return nil, errors.New("read /v1/models: it lists no model")
	}
	switch body, err = a.get(ctx, "/version"); {
	case err == nil:
		var v struct {
			Version string `json:"version"`
		}
		if json.Unmarshal(body, &v) == nil && v.Version != "" {
			s.Version, s.Engine = v.Version, "vllm "+v.Version
		}
	case !missing(err):
		return nil, err
	}
	text, err := a.metrics(ctx)
	if err != nil {
		return nil, err
	}
	s.Figures, s.Connector = *parseFigures(text), connectorOfMetrics(text)
	info, err := a.serverInfo(ctx)
	if err != nil {
		return nil, err
	}
	info.tell(s)
	return s, nil
}

// Nudge has the engine make a step: it computes one token.
func (a *Asker) Nudge(ctx context.Context, model string) error {
	body, err := json.Marshal(map[string]any{"model": model, "prompt": ".", "max_tokens": 1})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, a.Base+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := a.Client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, answerBytesMax))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = &errStatus{"/v1/completions", resp.StatusCode, firstLine(answer)}
	}
	return err
}

// Figures reads /metrics; an engine that has none tells nothing.
func (a *Asker) Figures(ctx context.Context) (*Figures, error) {
	text, err := a.metrics(ctx)
	if err != nil {
		return nil, err
	}
	return parseFigures(text), nil
}

// metrics is /metrics, "" where there is none.
func (a *Asker) metrics(ctx context.Context) (string, error) {
	body, err := a.get(ctx, "/metrics")
	if missing(err) {
		return "", nil
	}
	return string(body), err
}

// ofUse are the samples that parseFigures looks at.
var ofUse = map[string]func(f *Figures, s promtext.Sample){
	"vllm:num_requests_running":         func(f *Figures, s promtext.Sample) { f.Running = max(f.Running, 0) + s.Value },
	"vllm:num_requests_waiting":         func(f *Figures, s promtext.Sample) { f.Waiting = max(f.Waiting, 0) + s.Value },
	"vllm:kv_cache_usage_perc":          func(f *Figures, s promtext.Sample) { f.CacheUsage = max(f.CacheUsage, s.Value) },
	"vllm:gpu_cache_usage_perc":         func(f *Figures, s promtext.Sample) { f.CacheUsage = max(f.CacheUsage, s.Value) },
	"vllm:iteration_tokens_total_count": func(f *Figures, s promtext.Sample) { f.Steps = max(f.Steps, 0) + s.Value },
	"sglang:num_running_reqs":           func(f *Figures, s promtext.Sample) { f.Running = max(f.Running, 0) + s.Value },
	"sglang:num_queue_reqs":             func(f *Figures, s promtext.Sample) { f.Waiting = max(f.Waiting, 0) + s.Value },
	"sglang:token_usage":                func(f *Figures, s promtext.Sample) { f.CacheUsage = max(f.CacheUsage, s.Value) },
	"process_start_time_seconds":        func(f *Figures, s promtext.Sample) { f.Started = s.Value },
	"vllm:cache_config_info": func(f *Figures, s promtext.Sample) {
		f.BlockTokens, f.Blocks = number(s.Labels["block_size"]), number(s.Labels["num_gpu_blocks"])
		f.CacheDType = s.Labels["cache_dtype"]
	},
}

// parseFigures reads the few samples that are of use here, as far as they can be read. Several engines behind one server
// (data parallel) are summed.
func parseFigures(text string) *Figures {
	f := &Figures{Running: -1, Waiting: -1, CacheUsage: -1, Steps: -1}
	_ = promtext.Read(strings.NewReader(text), func(name []byte) bool { return ofUse[string(name)] != nil }, func(s promtext.Sample) { ofUse[s.Name](f, s) })
	return f
}

func number(s string) uint32 {
	v, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0
	}
	return uint32(v)
}
