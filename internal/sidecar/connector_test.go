package sidecar

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/headrace/headrace/internal/registry"
)

func TestConnectorOf(t *testing.T) {
	vllm := func(config string) string { return `vllm serve m --kv-transfer-config '` + config + `'` }
	for line, want := range map[string]Connector{
		"vllm serve m":     {},
		"my-server --kv x": {},
		vllm(`{"kv_connector":"NixlConnector","kv_role":"kv_both"}`):                                                                                                                                           {Dialect: DialectVLLMNixl},
		vllm(`{"kv_connector":"NixlPullConnector","kv_role":"kv_producer"}`):                                                                                                                                   {Dialect: DialectVLLMNixl, Role: "prefill"},
		vllm(`{"kv_connector":"HeadraceConnector","kv_connector_module_path":"headrace.vllm"}`):                                                                                                                {Dialect: DialectVLLM},
		vllm(`{"kv_connector":"NixlPushConnector","kv_role":"kv_both","engine_id":"e"}`):                                                                                                                       {Dialect: DialectVLLMNixlPush, Port: 5600, Engine: "e"},
		"VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.7 VLLM_NIXL_SIDE_CHANNEL_PORT=5700 " + vllm(`{"kv_connector":"NixlPushConnector","engine_id":"e"}`) + " --tensor-parallel-size 4 -pp 2":                            {Dialect: DialectVLLMNixlPush, Host: "10.0.0.7", Port: 5700, Engine: "e", TensorParallel: 4},
		"VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0 " + vllm(`{"kv_connector":"NixlPushConnector"}`):                                                                                                                  {Dialect: DialectVLLMNixlPush, Port: 5600},
		vllm(`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}`):                                                                                                                                   {Dialect: DialectVLLMMooncake, Role: "prefill", Port: 8998},
		"VLLM_MOONCAKE_BOOTSTRAP_PORT=9001 vllm serve m --kv-transfer-config.kv_connector MooncakeConnector --kv_transfer_config.kv_role=kv_consumer":                                                          {Dialect: DialectVLLMMooncake, Role: "decode", Port: 9001},
		vllm(`{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_ip":"10.0.0.7","kv_port":"14579"}`):                                                                                               {Dialect: DialectVLLMNCCL, Role: "prefill", Host: "10.0.0.7", Port: 14579},
		vllm(`{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer","kv_port":14580}`):                                                                                                                    {Dialect: DialectVLLMNCCL, Role: "decode", Port: 14580},
		vllm(`{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[{"kv_connector":"OffloadingConnector"},{"kv_connector":"NixlConnector","kv_role":"kv_both"}]}}`): {Dialect: DialectVLLMNixl},
		vllm(`{"kv_connector":"SomeOther"}`): {},
		vllm(`{"kv_connector":`):             {},
		"python -m sglang.launch_server --disaggregation-mode prefill --disaggregation-bootstrap-port 8999 --tp 2": {Dialect: DialectSGLang, Role: "prefill", Port: 8999, TensorParallel: 2},
		"python -m sglang.launch_server --disaggregation-mode=prefill":                                             {Dialect: DialectSGLang, Role: "prefill", Port: 8998},
		"python -m sglang.launch_server --disaggregation-mode decode":                                              {Dialect: DialectSGLang, Role: "decode"},
		"python -m sglang.launch_server --disaggregation-mode null":                                                {Dialect: DialectOpenAI},
	} {
		tpl, err := ParseTemplate(line)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if got := ConnectorOf(&Command{Words: tpl.Words, Env: tpl.Env}); got != want {
			t.Errorf("%s\ngot  %+v\nwant %+v", line, got, want)
		}
	}
}

func FuzzConnectorOf(f *testing.F) {
	f.Add("--kv-transfer-config", `{"kv_connector":"P2pNcclConnector","kv_port":1e300,"kv_connector_extra_config":{"connectors":[{}]}}`)
	f.Fuzz(func(t *testing.T, a, b string) {
		c := ConnectorOf(&Command{Words: []string{a, b}, Env: []string{a}})
		if c.Port < 0 || c.Port > 65535 {
			t.Errorf("port %d", c.Port)
		}
		_ = c.address("h:1")
	})
}

const sglangInfo = `{"model_path":"/m","served_model_name":"m","disaggregation_mode":"prefill","disaggregation_bootstrap_port":8999,"page_size":64,"max_total_num_tokens":6400,"kv_cache_dtype":"auto",` +
	`"tp_size":2,"pp_size":1,"version":"0.5.9","context_length":null,"internal_states":[{}]}`

// TestServerInfo holds what engines say of themselves beyond OpenAI's and vLLM's pages.
func TestServerInfo(t *testing.T) {
	vllmInfo := `{"vllm_config":{"kv_transfer_config":{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"e"},"parallel_config":{"tensor_parallel_size":4,"pipeline_parallel_size":2}}}`
	for _, tt := range []struct {
		name, path, info, metrics string
		status                    int
		want                      Connector
		engine                    string
		blocks                    uint32
	}{
		{name: "neither", want: Connector{}},
		{name: "SGLang", path: "/get_server_info", info: sglangInfo, want: Connector{Dialect: DialectSGLang, Role: "prefill", Port: 8999, TensorParallel: 2, PipelineParallel: 1}, engine: "sglang 0.5.9", blocks: 100},
		{name: "a newer SGLang", path: "/server_info", info: sglangInfo, want: Connector{Dialect: DialectSGLang, Role: "prefill", Port: 8999, TensorParallel: 2, PipelineParallel: 1}, engine: "sglang 0.5.9", blocks: 100},
		{name: "SGLang by itself", path: "/get_server_info", info: `{"disaggregation_mode":"null","version":"0.5.9"}`, want: Connector{Dialect: DialectOpenAI}, engine: "sglang 0.5.9"},
		{name: "vLLM for developers", path: "/server_info", info: vllmInfo, want: Connector{Dialect: DialectVLLMMooncake, Role: "prefill", Port: 8998, Engine: "e", TensorParallel: 4, PipelineParallel: 2}},
		{name: "something else", path: "/server_info", info: `{"version":3}`, want: Connector{}},
		{name: "forbidden", path: "/server_info", status: 403, want: Connector{}},
		{name: "metrics of NIXL", metrics: "a 1\nvllm:nixl_xfer_time_seconds_sum 0\n", want: Connector{Dialect: DialectVLLMNixl}},
		{name: "metrics of ours", metrics: "vllm:headrace_pushes_total 0\n", want: Connector{Dialect: DialectVLLM}},
		{name: "what is said counts more", metrics: "vllm:nixl_x 1\n", path: "/server_info", info: vllmInfo, want: Connector{Dialect: DialectVLLMMooncake, Role: "prefill", Port: 8998, Engine: "e", TensorParallel: 4, PipelineParallel: 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.URL.Path == "/v1/models":
					fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
				case r.URL.Path == "/metrics" && tt.metrics != "":
					fmt.Fprint(w, tt.metrics)
				case r.URL.Path == tt.path && tt.status != 0:
					w.WriteHeader(tt.status)
				case r.URL.Path == tt.path:
					fmt.Fprint(w, tt.info)
				default:
					http.NotFound(w, r)
				}
			}))
			defer srv.Close()
			defer srv.Client().CloseIdleConnections()
			self, err := (&Asker{Base: srv.URL, Client: srv.Client()}).Self(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if self.Connector != tt.want || self.Engine != tt.engine || self.Blocks != tt.blocks {
				t.Errorf("got %+v, %q, %d blocks", self.Connector, self.Engine, self.Blocks)
			}
		})
	}
}

// TestListedAsItSays: an SGLang that nobody has described is listed as what it says that it is.
func TestListedAsItSays(t *testing.T) {
	r := start(t, func(c *Config) {
		c.Command.Words = append(c.Command.Words, "slow")
		c.Entry.Role = registry.RoleDecode // which it is not
	})
	r.set("info=" + url.QueryEscape(sglangInfo))
	r.set("up=1")
	w := r.board.next(t)
	host, _, _ := strings.Cut(r.addr, ":")
	if w.Dialect != DialectSGLang || w.Role != "prefill" || w.KVAddr != host+":8999" || w.TensorParallel != 2 || w.BlockTokens != 64 || w.Blocks != 100 || w.Engine != "sglang 0.5.9" || len(w.Fingerprint) != 64 {
		t.Errorf("listed as %+v", w)
	}
	if text := r.out.String(); strings.Count(text, "the engine can only prefill") != 1 {
		t.Errorf("it was told %q", text)
	}
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
}

// TestWhatIsMissing: what a router needs and nobody said is asked for.
func TestWhatIsMissing(t *testing.T) {
	for _, tt := range []struct {
		c    Connector
		role string
		want string
	}{
		{Connector{Dialect: DialectVLLMNixl}, "prefill", ""},
		{Connector{Dialect: DialectVLLMMooncake}, "prefill", "--kv-address"},
		{Connector{Dialect: DialectVLLMMooncake}, "decode", ""},
		{Connector{Dialect: DialectVLLMNixlPush, Port: 1}, "both", "--kv-engine"},
		{Connector{Dialect: DialectVLLMNCCL}, "decode", "--kv-address"},
		{Connector{Dialect: DialectSGLang}, "prefill", "--kv-address"},
		{Connector{Dialect: DialectSGLang}, "decode", ""},
	} {
		if got := tt.c.missing(tt.role); (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%+v as %s: %q", tt.c, tt.role, got)
		}
	}
	forced := Connector{Dialect: DialectOpenAI}.Over(Connector{Dialect: DialectVLLMMooncake, Port: 8998, Role: "prefill"})
	if forced.Dialect != DialectOpenAI || forced.Port != 0 || forced.Role != "" {
		t.Errorf("%+v", forced)
	}
}
