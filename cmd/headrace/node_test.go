package main

import (
	"maps"
	"testing"

	"github.com/headrace/headrace/internal/registry"
)

// A daemon opens channels to those that decode for what its own workers prefill.
func TestPeersOf(t *testing.T) {
	w := func(role, node, model string) registry.Worker {
		return registry.Worker{Role: role, NodeID: node, NodeData: node + ":1", Fingerprint: model}
	}
	for _, c := range []struct {
		name string
		of   []registry.Worker
		want map[string]string
	}{
		{"nobody is here", nil, map[string]string{}},
		{"prefill here", []registry.Worker{w("prefill", "a", "m"), w("decode", "b", "m"), w("decode", "c", "other"), w("prefill", "d", "m"), w("both", "e", "m")}, map[string]string{"b": "b:1", "e": "e:1"}},
		{"decode here", []registry.Worker{w("decode", "a", "m"), w("decode", "b", "m"), w("prefill", "c", "m")}, map[string]string{}},
		{"both here", []registry.Worker{w("both", "a", "m"), w("decode", "a", "m"), w("decode", "b", "m")}, map[string]string{"b": "b:1"}},
		{"no daemon there", []registry.Worker{w("prefill", "a", "m"), {Role: "decode", NodeID: "b", Fingerprint: "m"}}, map[string]string{}},
	} {
		if got := peersOf(&registry.View{Workers: c.of}, "a"); !maps.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
