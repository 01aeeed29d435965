package sidecar

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
)

// serverInfo is what engines say of their configuration: SGLang at /get_server_info, in newer releases at /server_info; vLLM
// at the latter, in its developer mode.
type serverInfo struct {
	Version     string `json:"version"`
	Mode        string `json:"disaggregation_mode"`
	Bootstrap   int    `json:"disaggregation_bootstrap_port"`
	PageSize    uint32 `json:"page_size"`
	TokensMax   uint64 `json:"max_total_num_tokens"`
	CacheDType  string `json:"kv_cache_dtype"`
	TensorSize  uint32 `json:"tp_size"`
	PipeSize    uint32 `json:"pp_size"`
	ContextSize uint32 `json:"context_length"`

	VLLM struct {
		Transfer *transferConfig `json:"kv_transfer_config"`
		Parallel struct {
			Tensor uint32 `json:"tensor_parallel_size"`
			Pipe   uint32 `json:"pipeline_parallel_size"`
		} `json:"parallel_config"`
	} `json:"vllm_config"`
}

// connector is what the engine says of how it exchanges KV cache.
func (i *serverInfo) connector() Connector {
	if t := i.VLLM.Transfer; t != nil {
		c := t.of(func(string) string { return "" })
		c.TensorParallel, c.PipelineParallel = i.VLLM.Parallel.Tensor, i.VLLM.Parallel.Pipe
		return c
	}
	if i.Mode == "" {
		return Connector{}
	}
	c := sglangConnector(i.Mode, i.Bootstrap)
	c.TensorParallel, c.PipelineParallel = i.TensorSize, i.PipeSize
	return c
}

// tell adds to s what an SGLang says of itself.
func (i *serverInfo) tell(s *Self) {
	if s.Connector = i.connector().Over(s.Connector); i.Mode == "" {
		return
	}
	s.Engine = strings.TrimSpace("sglang " + i.Version)
	if i.PageSize > 0 {
		s.BlockTokens, s.Blocks = i.PageSize, uint32(min(i.TokensMax/uint64(i.PageSize), 1<<32-1))
	}
	if s.ContextTokens == 0 {
		s.ContextTokens = i.ContextSize
	}
	s.CacheDType = i.CacheDType
}

// serverInfo asks for it; an engine that has no such page, or one that is about something else, says nothing.
func (a *Asker) serverInfo(ctx context.Context) (*serverInfo, error) {
	i := &serverInfo{}
	for _, path := range []string{"/get_server_info", "/server_info?config_format=json"} {
		body, err := a.get(ctx, path)
		switch {
		case errors.As(err, new(*errStatus)):
			continue
		case err != nil:
			return nil, err
		}
		if json.Unmarshal(body, i) != nil { // a member of another kind than expected is no reason not to list the engine
			i = &serverInfo{}
		}
		break
	}
	return i, nil
}

// connectorMetrics are the beginnings of the names that connectors' metrics have.
var connectorMetrics = []struct{ name, dialect string }{
	{"vllm:headrace_", DialectVLLM}, {"vllm:nixl_", DialectVLLMNixl}, {"vllm:mooncake_", DialectVLLMMooncake},
}

// connectorOfMetrics guesses from the names in /metrics.
func connectorOfMetrics(text string) Connector {
	for _, m := range connectorMetrics {
		if strings.HasPrefix(text, m.name) || strings.Contains(text, "\n"+m.name) {
			return Connector{Dialect: m.dialect}
		}
	}
	return Connector{}
}
