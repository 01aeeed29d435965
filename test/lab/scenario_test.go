package main

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestScenariosAreRight(t *testing.T) {
	seen := make(map[string]bool)
	for _, s := range scenarios {
		if err := s.check(); err != nil {
			t.Error(err)
		}
		if seen[s.name] {
			t.Errorf("two scenarios are called %q", s.name)
		}
		seen[s.name] = true
	}
}

func TestCheckFindsWhatIsWrong(t *testing.T) {
	ok := step{test: "./rdma"}
	for why, s := range map[string]*scenario{
		"name":     {name: "Two words", about: "x", steps: []step{ok}},
		"about":    {name: "a", steps: []step{ok}},
		"steps":    {name: "a", about: "x"},
		"machines": {name: "a", about: "x", machines: 3, steps: []step{ok}},
		"both":     {name: "a", about: "x", steps: []step{{test: "./rdma", command: []string{"ip"}}}},
		"where":    {name: "a", about: "x", steps: []step{{test: "./rdma", on: 2}}},
		"idle":     {name: "a", about: "x", machines: 2, steps: []step{{test: "./rdma", on: 1}}},
		"filter":   {name: "a", about: "x", steps: []step{{test: "./rdma", run: "("}}},
		"absent":   {name: "a", about: "x", steps: []step{ok}, absent: "("},
	} {
		if s.check() == nil {
			t.Errorf("%s: nothing was found", why)
		}
	}
}

func TestScript(t *testing.T) {
	s := &scenario{
		name: "two", about: "x", machines: 2, rails: 2, headrace: true, env: []string{"A=1"}, setup: [][]string{{"tc", "qdisc"}},
		steps: []step{{on: 1, test: "./rdma", run: "One"}, {on: 2, command: []string{"ip", "link"}}, {test: "./cgo", env: []string{"B=2"}}},
	}
	if err := s.check(); err != nil {
		t.Fatal(err)
	}
	got := s.script(&options{count: 1, full: true}, []string{"/m"}, time.Minute)
	if len(got.Machines) != 2 || len(got.Machines[0].Commands) != 2 || len(got.Machines[1].Commands) != 2 {
		t.Fatalf("%+v", got)
	}
	for i, m := range got.Machines {
		far := []string{"10.9.0.2,10.9.1.2", "10.9.0.1,10.9.1.1"}[i]
		env := m.Commands[1].Env
		for _, want := range []string{"HEADRACE_LAB=1", "HEADRACE_FULL=1", "HEADRACE_BIN=/bin/headrace", "LAB_PEERS=" + far, "LAB_RAILS=eth0,eth1", "A=1", "B=2"} {
			if !slices.Contains(env, want) {
				t.Errorf("machine %d: no %s in %v", i+1, want, env)
			}
		}
		if last := m.Setup[len(m.Setup)-1]; last[0] != "tc" {
			t.Errorf("machine %d: the scenario's own setup is not last: %v", i+1, m.Setup)
		}
	}
	if c := got.Machines[0].Commands[0]; !slices.Contains(c.Args, "-test.run=One") || !slices.Contains(c.Args, "-test.v") || c.Dir != "/work/rdma.test" {
		t.Errorf("%+v", c)
	}
	if c := got.Machines[1].Commands[0]; c.Args[0] != "ip" {
		t.Errorf("%+v", c)
	}
}

func TestChosen(t *testing.T) {
	if all, err := chosen(&options{}); err != nil || len(all) != len(scenarios) {
		t.Errorf("all: %d, %v", len(all), err)
	}
	if _, err := chosen(&options{scenario: "rdma,none"}); err == nil || !strings.Contains(err.Error(), `"none"`) {
		t.Errorf("a scenario that is not there: %v", err)
	}
	some, err := chosen(&options{scenario: "rdma", packages: []string{"./cgo"}})
	if err != nil || len(some) != 1 || len(some[0].steps) != 1 || some[0].steps[0].test != "./cgo" {
		t.Errorf("packages in a scenario's machine: %+v, %v", some, err)
	}
}

const said = `=== RUN   TestA
    a_test.go:3: a figure
--- PASS: TestA (0.01s)
    --- PASS: TestA/sub (0.01s)
=== RUN   TestCUDA
    cuda_test.go:7: no GPU
--- SKIP: TestCUDA (0.00s)
=== RUN   TestCUDAParts
=== RUN   TestCUDAParts/one
    cuda_test.go:8: no compiler
=== RUN   TestCUDAParts/two
    cuda_test.go:8: no compiler
=== RUN   TestCUDAParts/three
    cuda_test.go:8: a size
--- PASS: TestCUDAParts (0.00s)
    --- SKIP: TestCUDAParts/one (0.00s)
    --- SKIP: TestCUDAParts/two (0.00s)
    --- PASS: TestCUDAParts/three (0.00s)
PASS
`

func TestReport(t *testing.T) {
	for _, c := range []struct {
		name, text, absent string
		verbose, lax       bool
		err                string
		shown              []string
		hidden             []string
	}{
		{name: "passed", text: said + "headrace-lab: exit status 0\n", absent: "CUDA", shown: []string{"a figure", "a size", "3 tests and parts of tests skipped that may: 2: no compiler; 1: no GPU\n"}, hidden: []string{"===", "TestA ", "exit status", "SKIP", "_test.go:7", "8: no compiler"}},
		{name: "verbose", text: said + "headrace-lab: exit status 0\n", absent: "CUDA", verbose: true, shown: []string{"=== RUN", "PASS: TestA/sub", "SKIP: TestCUDA ", "cuda_test.go:7: no GPU", "3 tests and parts"}},
		{name: "skipped", text: said + "headrace-lab: exit status 0\n", err: "3 skipped", shown: []string{"nothing may skip"}},
		{name: "skipped below", text: "    --- SKIP: TestA/sub (0.0s)\r\nheadrace-lab: exit status 0\n", err: "1 skipped"},
		{name: "failed", text: "--- FAIL: TestA (0.01s)\nheadrace-lab: exit status 1\n", err: "1 tests failed", shown: []string{"FAIL: TestA"}},
		{name: "failed, may skip", text: "=== RUN   TestCUDA\n    cuda_test.go:7: wrong\n--- FAIL: TestCUDA (0.01s)\nheadrace-lab: exit status 1\n", absent: "CUDA", err: "1 tests failed", shown: []string{"7: wrong\nvm2: --- FAIL: TestCUDA"}, hidden: []string{"skipped"}},
		{name: "died, may skip", text: "=== RUN   TestCUDA\n    cuda_test.go:7: begun\npanic: x\nheadrace-lab: exit status 2\n", absent: "CUDA", err: "status 2", shown: []string{"panic: x", "7: begun"}},
		{name: "command", text: "headrace-lab: exit status 3\n", err: "status 3"},
		{name: "silent", text: "", err: "without a status"},
		{name: "nothing", text: "testing: warning: no tests to run\nheadrace-lab: exit status 0\n", err: "ran no test"},
		{name: "nothing asked", text: "testing: warning: no tests to run\nheadrace-lab: exit status 0\n", lax: true, hidden: []string{"warning"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			r := &report{prefix: "vm2: ", verbose: c.verbose, lax: c.lax, out: &out, mu: &sync.Mutex{}, status: -1}
			if c.absent != "" {
				r.absent = regexp.MustCompile(c.absent)
			}
			for line := range strings.Lines(c.text) {
				r.line(strings.TrimSuffix(line, "\n"))
			}
			r.end()
			if err := r.err(); (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			for _, s := range c.shown {
				if !strings.Contains(out.String(), s) {
					t.Errorf("%q is not shown:\n%s", s, out.String())
				}
			}
			for _, s := range c.hidden {
				if strings.Contains(out.String(), s) {
					t.Errorf("%q is shown:\n%s", s, out.String())
				}
			}
			if out.Len() > 0 && !strings.HasPrefix(out.String(), "vm2: ") {
				t.Errorf("no prefix: %s", out.String())
			}
		})
	}
}
