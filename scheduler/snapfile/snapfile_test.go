package snapfile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestErrorsSayLineAndWhatToDo(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"hosts:\n  - {name: a, memroy: 1}", `line 2: hosts[0]: unknown field "memroy"; did you mean "memory"?`},
		{"hosts:\n  - {name: a, zzz: 1}", "there are name, cluster, state"},
		{"hosts:\n  - name: a\n    memory: -5GiB", "line 3: hosts[0].memory: \"-5GiB\" is no amount of memory: it is negative"},
		{"hosts:\n  - {name: a}\n  - {name: a}", `line 3: host "a" stands already on line 2; names are unique, rename one`},
		{"hosts:\n  - {name: a}\nhosts: []", `line 3: "hosts" stands already on line 1; remove one of them`},
		{"hosts:\n  - {memory: 1}", "line 2: a host has no name; give it one"},
		{"hosts: {a: 1}", "line 1: hosts: write a list here, not a mapping"},
		{"hosts:\n  - {name: a, state: redy}", `"redy" is none of ready, not_ready, maintenance, unreachable`},
		{"hosts:\n  - {name: a, memory: 1, memory_used: 2}", "correct one of them"},
		{"hosts:\n  - {name: a, gpus: [{memory: 1, index: 0}, {memory: 1, index: 0}]}", "GPU 0 stands there twice"},
		{"models:\n  - {name: m, gpus: [x]}", `"x" names no GPU; write host:index`},
		{"hosts: [{name: h}]\nmodels:\n  - {name: m, gpus: [\"h:0\"]}", "line 3: model m: host h has no GPU of that index"},
		{"instances:\n  - {name: i, model: m, host: h}", `there is no model "m"; add it or correct the name`},
		{"models: [{name: m, replicas: -1}]", "-1 is negative; write 0 or more"},
		{"jobs: [{name: j, queue: q}]", `there is no queue "q"`},
		{"queues: [{name: q}]\njobs: [{name: j, queue: q, min_available: 2, tasks: [{}]}]", "min_available is 2 and it has 1 tasks"},
		{"a: &x 1\nb: *x", "unknown field"},
		{"hosts: &x []", "anchors and aliases are not read"},
		{"hosts: []\n---\nhosts: []", "more than one YAML document"},
		{"hosts: [", "line 1: did not find expected node content"},
		{"serving: [{name: s, ratio: {min: 1/0}}]", "it divides by zero"},
		{"serving: [{name: s, ratio: {min: 1e9}}]", "not a decimal number"},
		{"models: [{name: m, claim: {gpu_share: 2}}]", "it is a share, at most 1"},
		{"queues: [{name: q, quota: {cards: {x: -1}}}]", "it is negative"},
		{"hosts: [{name: h, memory: 300TiB}]", "write at most 256TiB"},
		{"hosts: [{name: h, cpu: 1000000001}]", "write at most 1000000000"},
		{"settings: {placement_max: 1e300}", "is out of range"},
		{"hosts: [{name: h, memory: .nan}]", "not a decimal number"},
		{"hosts: [{name: h, memory: 99999999999999999999}]", "it is larger than 9223372036854775807"},
		{"settings: {ram_weight: .inf}", "is not a number"},
		{"settings: {ram_weight: -1}", "-1 is negative; write 0 or more"},
		{"hosts: [{name: h, gpus: [{memory: 1, count: 1000000000}]}]", "more than 64 GPUs"},
		{"hosts: [{name: h, gpus: [{memory: 1, count: 99999999999999999999}]}]", "is not a whole number"},
		{"models: [{name: m, replicas: 1000001}]", "1000001 replicas are more than 1000000"},
		{"models: [{name: m, replicas: 600000}, {name: n, replicas: 600000}]", "more than 1000000 replicas up to here"},
		{"models: [{name: m}]\ngangs: [{name: g, members: [{model: m, count: 9000000000000000000}, {model: m, count: 9000000000000000000}]}]", "line 2: gang g: more than 10000 members; make several gangs of it"},
		{"queues: [{name: q}]\njobs: [{name: j, queue: q, tasks: [{count: 600000}, {count: 600000}]}]", "more than 1000000 tasks up to this job"},
		{"queues: [{name: q}]\njobs: [{name: j, queue: q, tasks: [{count: 1000000, request: {memory: 256TiB}}]}]", "more than 1EiB is claimed; correct the amounts or the counts"},
		{"queues: [{name: q}]\njobs: [{name: j, queue: q, tasks: [{name: a}, {name: a}]}]", "names are unique, rename one"},
		{"hosts: [{name: h, gpus: [{memory: 1}]}]\nmodels: [{name: m}]\ninstances: [{name: i, model: m, host: h, gpus: [0, 0]}]", "line 3: instance i: GPU 0 of host h stands there twice; remove one"},
		{"hosts: [{name: h}, {name: g}]\nmodels: [{name: m}]\ninstances: [{name: i, model: m, host: h, parts: [{host: g}]}]", "it has a host and parts; say it once"},
		{"models: [{name: m, draft: m}]", "drafts for itself; name another model"},
		{"serving: [{name: s, roles: [{name: p}], groups: [{roles: [{role: d}]}]}]", "there is no role \"d\""},
		{"serving: [{name: s, roles: [{name: p}], groups: [{roles: [{role: p}, {role: p}]}]}]", "give each its own ordinal"},
		{"hosts: [{name: h}]\nserving: [{name: s, groups: [{roles: [{role: p, pods: [{host: g}]}]}]}]", "there is no host \"g\""},
		{"serving: [{name: s, ratio: {prefill_min: 3, prefill_max: 2}}]", "prefill_min 3 is more than prefill_max 2"},
		{"serving: [{name: s, ratio: {decode_min: 3, decode_max: 2}}]", "decode_min 3 is more than decode_max 2"},
		{"serving: [{name: s, ratio: {prefill: 9223372036854775807}}]", "a number above 1000000"},
		{"just text", "line 1: write a mapping (name: value) here, not the text \"just text\""},
	} {
		_, err := Parse([]byte(c.text))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q:\n got %v\nwant %s", c.text, err, c.want)
		}
	}
}

func TestAmounts(t *testing.T) {
	s, err := Parse([]byte("hosts: [{name: a, memory: 1.5GiB, cpu: 500m, gpus: [{model: X, memory: 2Gi, count: 3}]}, {name: b, memory: 10GB, cpu: 0.25}]"))
	if err != nil {
		t.Fatal(err)
	}
	a, b := s.Hosts[0], s.Hosts[1]
	if a.Memory != 3<<29 || a.CPU != 500 || b.Memory != 10_000_000_000 || b.CPU != 250 {
		t.Errorf("%+v %+v", a, b)
	}
	if len(a.GPUs) != 3 || *a.GPUs[2].Index != 2 || a.GPUs[1].Card != "X" || a.GPUs[0].Vendor != "cuda" {
		t.Errorf("%+v", a.GPUs)
	}
	if s, err := Parse(nil); err != nil || len(s.Hosts) != 0 {
		t.Errorf("an empty file: %v", err)
	}
}

// FuzzParse: whatever is read, the answer is a checked snapshot or an error, and never both.
func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("../testdata/cases/*.yaml")
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := Parse(text)
		if (s == nil) == (err == nil) {
			t.Fatalf("%v and %v", s, err)
		}
		if err != nil && err.Error() == "" {
			t.Fatal("an error without words")
		}
	})
}
