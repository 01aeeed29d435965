package node_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
)

// What is measured of lanes from outside is in /status and /metrics, with its source and the reason for it.
func TestWhatIsMeasuredFromOutside(t *testing.T) {
	a := startNode(t, nodeConfig{NodeID: "node-a", Transport: "tcp", Telemetry: "kernel"})
	b := startNode(t, nodeConfig{NodeID: "node-b", Transport: "tcp"})
	p, d := newEngine(t, a.Socket, "p", wideLayout()), newEngine(t, b.Socket, "d", wideLayout())
	works(t, p, d)
	var st node.Status
	if err := json.Unmarshal([]byte(get(t, a, "/status")), &st); err != nil {
		t.Fatal(err)
	}
	size := uint64(len(p.mem.Bytes()))
	w := st.Channels[0].Wire
	if w.Source != "kernel" || !strings.Contains(w.Why, "telemetry is set to kernel") || w.SentBytes < size || w.SentBytes > 2*size || w.SentPackets == 0 || w.RTTMicros <= 0 {
		t.Errorf("%d bytes were pushed: %+v", size, w)
	}
	if s := st.Telemetry.Sources[0]; s.Of != "sockets" || s.From != "kernel" {
		t.Errorf("%+v", st.Telemetry)
	}
	metrics := get(t, a, "/metrics")
	for _, want := range []string{
		`headrace_channel_wire_info{dialled="true",peer="node-b",source="kernel",transport="tcp"} 1`, `headrace_channel_wire_sent_bytes_total{dialled="true",peer="node-b",transport="tcp"}`,
		`headrace_channel_wire_packets_total{dialled="true",direction="received",peer="node-b",transport="tcp"}`, `headrace_channel_wire_retransmitted_packets_total{dialled="true",peer="node-b",transport="tcp"}`,
		`headrace_channel_wire_rtt_seconds{dialled="true",peer="node-b",transport="tcp"}`, `headrace_telemetry_info{of="posts",source="none"} 1`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %s in\n%s", want, metrics)
		}
	}
	if off := get(t, b, "/metrics"); strings.Contains(off, "_wire_") || strings.Contains(off, "headrace_telemetry_info") {
		t.Errorf("a daemon that measures nothing says\n%s", off)
	}
	var quiet node.Status
	if err := json.Unmarshal([]byte(get(t, b, "/status")), &quiet); err != nil {
		t.Fatal(err)
	}
	if quiet.Telemetry.Mode != "off" || quiet.Channels[0].Wire != (transfer.Wire{Source: "none", Why: quiet.Channels[0].Wire.Why}) {
		t.Errorf("%+v, %+v", quiet.Telemetry, quiet.Channels[0].Wire)
	}
}
