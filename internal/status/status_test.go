package status

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

func serve(t *testing.T, body string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/status" {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// serveEngine is a vLLM's pages.
func serveEngine(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
		case "/metrics":
			_, _ = io.WriteString(w, "vllm:num_requests_running 3.0\nvllm:num_requests_waiting 4.0\nvllm:kv_cache_usage_perc 0.25\n")
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func view(t *testing.T) *registry.View {
	return &registry.View{
		Nodes: []registry.Node{{ID: "node-0", Host: "h", PID: 4, Started: time.Now(), Admin: serve(t, `{"engines":[{"engine_id":"e","about":{"engine":"vllm"}},{"engine_id":"e/0","member_of":"e"},
			{"engine_id":"vllm-0","leases":2},{"engine_id":"vllm-0/0","member_of":"vllm-0","regions":[{"bytes":1048576,"kind":"memory"}]},
			{"engine_id":"vllm-0/1","member_of":"vllm-0","regions":[{"bytes":1048576,"kind":"memory"}]}],
			"leases":[{"side":"target","state":"bound","engine":"e","peer_node":"node-1","tokens":9,"pieces_wanted":4,"pieces_done":1}],
			"channels":[{"peer_node":"node-1","transport":"tcp","why":"another host","fencing":"by windows","lanes":4,"lanes_up":4,"sent_bytes_per_s":3145728,"speed_bytes_per_s":2147483648,"backlog_bytes":2048,"rtt_us":41.6,
			"pieces_altered":1,"methods":[{"direction":"send","run_bytes":256,"mode":"staged"},{"direction":"send","run_bytes":65536,"mode":"direct"},
			{"direction":"receive","run_bytes":256,"mode":"staged"}]}],
			"transports":[{"name":"tcp","usable":true},{"name":"rdma","usable":true,"ports":[
			{"device":"mlx5_0","port":1,"netdev":"eth0","pci":"0000:3b:00.0","numa_node":1,"state":"active","rate_mbps":200000,"mtu":4096,"gid":"10.0.0.1","gid_index":3,
			"gid_type":"RoCE v2","virtual_function":-1,"vfs":1,"vfs_max":8,"used":true,"reason":"IPv4 address 10.0.0.1"},
			{"device":"mlx5_1","port":1,"numa_node":-1,"physical_function":"0000:3b:00.0","virtual_function":0,"used":false,"reason":"it is down"}]}]}`)}},
		Workers: []registry.Worker{
			{ID: "decode-0", Role: "decode", Model: "m", Addr: serve(t, `{"running":1,"waiting":2,"blocks_total":10,"blocks_free":7,"blocks_leased":3}`)},
			{ID: "vllm-0", Role: "decode", Model: "m", Addr: serveEngine(t), Dialect: "vllm", Engine: "vllm 0.32.0", BlockTokens: 32, Blocks: 1000, ContextTokens: 2048,
				TensorParallel: 2, Opaque: true, Layout: "2 layers of 4 KiB", Fingerprint: "0123456789abcdef", Events: "h:5", NodeID: "node-0", NodeData: "h:7"},
			{ID: "alone-0", Role: "both", Addr: serveEngine(t), Dialect: "vllm"},
			{ID: "ill-0", Role: "both", Addr: serve(t, ""), Dialect: "openai"},
			{ID: "dead-0", Addr: "127.0.0.1:1"},
			{ID: "odd-0", Addr: serve(t, "no JSON")},
		},
		Routers: []registry.Router{{ID: "router-0", Addr: "h:8000"},
			{ID: "router-1", Admin: serve(t, `{"workers":[{"id":"odd-0","engine":{"age_ms":700,"running":5,"waiting":6,"kv_usage":0.424}},{"id":"vllm-0","engine":{"age_ms":5,"kv_usage":-1,"events":[{"state":"following","blocks":200},{"state":"connecting","blocks":31}]}},{"id":"decode-0","engine":{"age_ms":-1,"stale":true,"kv_usage":-1}}]}`)},
			{ID: "router-2", Admin: serve(t, `{"workers":[{"id":"odd-0","engine":{"age_ms":900,"running":9,"waiting":9,"kv_usage":0.9}},{"id":"dead-0","cooling":"refused","cooling_ms":900}]}`)}},
	}
}

func TestGatherAndPrint(t *testing.T) {
	r := Gather(t.Context(), []string{"e:1"}, view(t))
	var out bytes.Buffer
	if err := r.Print(&out, false); err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{
		"http://h:8000/v1", "no admin address", "decode-0 decode m none 3/7/3/10 1 2 - 0", "odd-0 none - 5 6 42 % 0", "dead-0 none - - - - 0", ", left alone: refused (router-2)", "connection refused", "read /status: invalid",
		"vllm-0 decode m node-0 250/750/-/1000 3 4 25 % 0 - ok", "alone-0 both none - 3 4 25 % 0 - its connector is not with a node daemon", "ill-0 both none - - - - 0 - /health: 404",
		"vllm-0 vllm 0.32.0 vllm 32 2048 2 2.0 MiB in 2 (memory) 2 0123456789ab h:5 (connecting, 231 blocks) 2 layers of 4 KiB, opaque", "alone-0 - vllm - - - - - - - -",
		"node-0 h 2 1 4", "node-0 -> node-1 tcp 4/4 3.0 MiB 0 B 2.0 GiB 2.0 KiB 42 us 0 1 " +
			"send staged (runs to 256 B), direct (runs to 64.0 KiB); receive staged (runs to 256 B) another host; fences by windows", "node-0 e target node-1 bound 9 1/4",
		"node-0 mlx5_0:1 eth0 0000:3b:00.0 1 PF, 1/8 VFs active 200 Gb/s 4096 10.0.0.1 (RoCE v2, index 3) yes IPv4 address 10.0.0.1",
		"node-0 mlx5_1:1 - - - VF 0 of 0000:3b:00.0 - - - - no it is down",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

func TestJSONReadsBack(t *testing.T) {
	r := Gather(t.Context(), []string{"e:1"}, view(t))
	var out bytes.Buffer
	if err := r.Print(&out, true); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(out.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	if back.Workers[1].ID != "decode-0" && back.Workers[0].ID != "decode-0" || back.Nodes[0].Status.Channels[0].Lanes != 4 {
		t.Errorf("read back %+v", back)
	}
	if e := back.Nodes[0].Status.Engines; e[1].MemberOf != "e" || strings.Join(strings.Fields(string(e[0].About)), "") != `{"engine":"vllm"}` {
		t.Errorf("engines read back as %+v", e)
	}
}
