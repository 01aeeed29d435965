package sidecar

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/headrace/headrace/internal/config"
)

// Devices that an engine runs on.
const (
	DeviceCPU  = "cpu"
	DeviceCUDA = "cuda"
)

// Shape is what the named templates make flags and variables of. Zero values leave the engine its own choice.
type Shape struct {
	Device         string
	Threads        int // on a CPU, of each engine
	TensorParallel int
	KVMemory       config.Size
	BlockTokens    int
	ConnectorPath  string   // goes in front of PYTHONPATH; "" for a connector that is installed
	PythonPath     string   // what PYTHONPATH is otherwise
	Args           []string // the user's own, last
}

// Names are those that Named knows.
var Names = []string{"vllm", "vllm-nixl", "vllm-plain"}

// kvEvents has the engine tell which blocks it caches. The router's index of prefixes follows them.
const kvEvents = `{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://{bind-host}:{port:events}",` +
	`"replay_endpoint":"tcp://{bind-host}:{port:replay}","buffer_steps":1000,"topic":"kv-events"}`

// Named is one of the templates that come with Headrace.
func Named(name string, s Shape) (*Template, error) {
	t := &Template{Name: name, Words: []string{"{python}", "-m", "vllm.entrypoints.cli.main", "serve", "{model}",
		"--served-model-name", "{model-name}", "--host", "{host}", "--port", "{port}"}}
	transfer := ""
	switch name {
	case "vllm":
		t.Dialect = DialectVLLM
		// Either kind of leg and whole requests are taken by any of them: what an engine is for is the router's to know.
		transfer = `{"kv_connector":"HeadraceConnector","kv_connector_module_path":"headrace.vllm","kv_role":"kv_both",` +
			`"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"headrace_socket":"{socket}","headrace_engine":"{engine-id}"}}`
		if s.ConnectorPath != "" {
			path := s.ConnectorPath
			if s.PythonPath != "" {
				path += ":" + s.PythonPath
			}
			t.Env = append(t.Env, "PYTHONPATH="+path)
		}
	case "vllm-nixl":
		t.Dialect = DialectVLLMNixl
		buffer := ""
		if s.Device == DeviceCPU {
			buffer = `"kv_buffer_device":"cpu",`
		}
		transfer = `{"kv_connector":"NixlConnector","kv_role":"{kv-role}",` + buffer + `"kv_load_failure_policy":"recompute"}`
		t.Env = append(t.Env, "VLLM_NIXL_SIDE_CHANNEL_HOST={host}", "VLLM_NIXL_SIDE_CHANNEL_PORT={port:nixl}")
	case "vllm-plain":
		t.Dialect = DialectOpenAI
	default:
		return nil, fmt.Errorf("there is no engine %q; there are %s, and --command for any other", name, strings.Join(Names, ", "))
	}
	s.fill(t)
	if transfer != "" {
		t.Words = append(t.Words, "--kv-transfer-config", transfer)
	}
	t.Words = append(t.Words, "--kv-events-config", kvEvents)
	t.Words = append(t.Words, s.Args...)
	return t, t.check()
}

// fill adds what the shape asks for.
func (s *Shape) fill(t *Template) {
	if s.Device == DeviceCPU {
		// Compiling for a CPU takes minutes and a C++ compiler; --no-enforce-eager behind -- has it done.
		t.Env = append(t.Env, "VLLM_TARGET_DEVICE=cpu")
		t.Words = append(t.Words, "--enforce-eager")
		if s.Threads > 0 { // several engines would otherwise all be bound to the same cores
			t.Env = append(t.Env, "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS="+strconv.Itoa(s.Threads))
		}
	}
	if s.TensorParallel > 1 {
		t.Words = append(t.Words, "--tensor-parallel-size", strconv.Itoa(s.TensorParallel))
	}
	if s.BlockTokens > 0 {
		t.Words = append(t.Words, "--block-size", strconv.Itoa(s.BlockTokens))
	}
	if s.KVMemory > 0 {
		t.Words = append(t.Words, "--kv-cache-memory-bytes", strconv.FormatUint(uint64(s.KVMemory), 10))
	}
}
