package main

import (
	"bytes"
	"context"
	"errors"
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

// Light scenarios run side by side, the others alone and before them; all are counted.
func TestPlayAll(t *testing.T) {
	var todo []*scenario
	for _, name := range []string{"light1", "alone1", "light2", "alone2", "light3"} {
		todo = append(todo, &scenario{name: name, light: strings.HasPrefix(name, "light")})
	}
	var mu sync.Mutex
	running, most := 0, map[bool]int{}
	var order []string
	two := make(chan struct{})
	met := sync.OnceFunc(func() { close(two) })
	passed, failures, tests := playAll(t.Context(), todo, func(s *scenario) (int, error) {
		mu.Lock()
		running++
		most[s.light] = max(most[s.light], running)
		order = append(order, s.name)
		if s.light && running == lightsMax {
			met()
		}
		mu.Unlock()
		if s.name == "light1" {
			<-two
		}
		mu.Lock()
		defer mu.Unlock()
		running--
		if s.name == "alone2" {
			return 1, errors.New("it fails")
		}
		return 2, nil
	})
	if err := errors.Join(failures...); passed != 4 || err == nil || err.Error() != "alone2: FAILED: it fails" || tests != 9 {
		t.Errorf("%d passed, %v, %d tests", passed, err, tests)
	}
	if most[false] != 1 || most[true] != lightsMax || !slices.Equal(order[:2], []string{"alone1", "alone2"}) {
		t.Errorf("%v at once, in the order %v", most, order)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if passed, failures, _ := playAll(ctx, todo, func(*scenario) (int, error) { return 0, errors.New("called") }); passed+len(failures) > 0 {
		t.Errorf("%d scenarios were played after the end", passed+len(failures))
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
		last               string // what is said again at the end
	}{
		{name: "passed", text: said + "headrace-lab: exit status 0\n", absent: "CUDA", shown: []string{"a figure", "a size", "3 tests and parts of tests skipped that may: 2: no compiler; 1: no GPU\n"}, hidden: []string{"===", "TestA ", "exit status", "SKIP", "_test.go:7", "8: no compiler"}},
		{name: "verbose", text: said + "headrace-lab: exit status 0\n", absent: "CUDA", verbose: true, shown: []string{"=== RUN", "PASS: TestA/sub", "SKIP: TestCUDA ", "cuda_test.go:7: no GPU", "3 tests and parts"}},
		{name: "skipped", text: said + "headrace-lab: exit status 0\n", err: "3 skipped", shown: []string{"nothing may skip"}},
		{name: "skipped below", text: "    --- SKIP: TestA/sub (0.0s)\r\nheadrace-lab: exit status 0\n", err: "1 skipped"},
		{name: "failed", text: "=== RUN   TestA\n=== RUN   TestA/b\n    a_test.go:3: wrong\n    a_test.go:4: level=INFO msg=x\n=== RUN   TestA/c\n    a_test.go:5: a figure\n--- FAIL: TestA (0.01s)\n    --- FAIL: TestA/b (0.00s)\n    --- PASS: TestA/c (0.00s)\n=== RUN   TestC\n    c_test.go:1: a size\n--- PASS: TestC (0.01s)\nFAIL\nheadrace-lab: exit status 1\n", err: "1 tests failed", shown: []string{"FAIL: TestA"}, last: "said last:\n--- FAIL: TestA (0.01s)\n    a_test.go:3: wrong\n    --- FAIL: TestA/b (0.00s)"},
		{name: "failed, may skip", text: "=== RUN   TestCUDA\n    cuda_test.go:7: wrong\n--- FAIL: TestCUDA (0.01s)\nheadrace-lab: exit status 1\n", absent: "CUDA", err: "1 tests failed", shown: []string{"7: wrong\nvm2: --- FAIL: TestCUDA"}, hidden: []string{"skipped"}},
		{name: "died, may skip", text: "=== RUN   TestCUDA\n    cuda_test.go:7: begun\npanic: x\nheadrace-lab: exit status 2\n", absent: "CUDA", err: "status 2", shown: []string{"panic: x", "7: begun"}, last: "7: begun\npanic: x"},
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
			if err := r.err(); err != nil && !strings.HasSuffix(r.explain(err).Error(), c.last) {
				t.Errorf("the end is %q, want %q", r.explain(err), c.last)
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
