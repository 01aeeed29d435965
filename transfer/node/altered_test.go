package node_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node"
	"github.com/headrace/headrace/transfer/transporttest"
)

// alteredPair is two daemon processes with a network between them that can be told to alter bytes.
type alteredPair struct {
	*attempt
	proxy  *transporttest.Proxy
	pAdmin string
	dAdmin string
}

func newAlteredPair(t *testing.T) *alteredPair {
	t.Helper()
	a, _ := startNodeProcess(t, nodeConfig{NodeID: "node-a", Transport: "tcp", Checksum: "always"})
	b, _ := startNodeProcess(t, nodeConfig{NodeID: "node-b", Transport: "tcp", Checksum: "always"})
	proxy := transporttest.NewProxy(t)
	t.Cleanup(proxy.Close)
	proxy.Target(b.DataAddr)
	p, d := newEngine(t, a.Socket, "p", wideLayout()), newEngine(t, b.Socket, "d", wideLayout())
	pattern(p, 7)
	fill(d.mem.Bytes(), 0xee)
	at := newAttempt(p, d)
	at.addr = proxy.Addr
	return &alteredPair{attempt: at, proxy: proxy, pAdmin: a.Admin, dAdmin: b.Admin}
}

// metric waits until a daemon's counter is at least what is wanted.
func metric(t *testing.T, admin, want string) {
	t.Helper()
	eventually(t, want, func() bool { return strings.Contains(get(t, node.Ready{Admin: admin}, "/metrics"), want) })
}

// Bytes of data frames that are altered between two daemons: what lands is right all the same.
func TestAlteredOnTheWire(t *testing.T) {
	for name, c := range map[string]struct {
		parts       []transporttest.Part
		pMetric     string
		dMetric     string
		lanesFailed bool
	}{
		"payload":       {[]transporttest.Part{transporttest.Payload}, "headrace_pieces_resent_total 1\n", "headrace_pieces_altered_total 1\n", false},
		"payload twice": {[]transporttest.Part{transporttest.Payload, transporttest.Payload}, "headrace_pieces_resent_total 2\n", "headrace_pieces_altered_total 2\n", false},
		"header":        {[]transporttest.Part{transporttest.Header}, `headrace_channel_lanes_redialled_total{dialled="true",peer="node-b",transport="tcp"} 1`, "headrace_pieces_altered_total 0\n", true},
		"trailer":       {[]transporttest.Part{transporttest.Trailer}, `headrace_channel_lanes_redialled_total{dialled="true",peer="node-b",transport="tcp"} 1`, "headrace_pieces_altered_total 0\n", true},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAlteredPair(t)
			a.proxy.Alter(c.parts...)
			a.bind()
			a.push(1)
			if err := a.p.Handoff(t.Context(), a.pLease, []byte("record")); err != nil {
				t.Fatal(err)
			}
			if ev := a.d.until(a.nonce, transfer.EventSettled); string(ev.Record) != "record" {
				t.Errorf("record %q", ev.Record)
			}
			a.p.until(a.nonce, transfer.EventSettled)
			for i := range a.from {
				if !bytes.Equal(block(a.d, 0, a.to[i]), block(a.p, 0, a.from[i])) {
					t.Fatalf("block %d arrived altered", i)
				}
			}
			if n := a.proxy.Altered(); n != len(c.parts) {
				t.Errorf("%d frames were altered, want %d", n, len(c.parts))
			}
			metric(t, a.pAdmin, c.pMetric)
			metric(t, a.dAdmin, c.dMetric)
			if !c.lanesFailed {
				metric(t, a.pAdmin, `headrace_channel_errors_total{dialled="true",peer="node-b",transport="tcp"} 0`)
			}
		})
	}
}

// A network that alters everything fails the lease, and says where to look.
func TestAlwaysAltered(t *testing.T) {
	a := newAlteredPair(t)
	a.proxy.AlterAll(transporttest.Payload)
	a.bind()
	a.push(1)
	for _, e := range []*engine{a.p, a.d} {
		if ev := e.until(a.nonce, transfer.EventEnded); !strings.Contains(ev.Reason, "arrived altered 4 times at node-b, last over lane") {
			t.Errorf("%s hears %q", e.id, ev.Reason)
		}
	}
}
