package operate

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/planner"
)

// record is one of a state.
func record(name, role, phase string, gpus ...string) *Record {
	return &Record{Engine: connector.Engine{Name: name, ID: name, Role: role, GPUs: gpus}, Phase: phase}
}

// FuzzState gives an operator states that nobody wrote: they are refused, or it goes on with them. Nothing is begun beyond the budget, no GPU is
// given twice, and what it writes it can read.
func FuzzState(f *testing.F) {
	now := time.Unix(1_800_000_000, 0)
	whole := &State{Version: stateVersion, Model: "m", Spec: testSpec, Planner: []byte(`{"samples":3,"streams":40}`), Epoch: now.Add(-time.Hour), Saved: now.Add(-time.Minute),
		Engines:   []*Record{record("prefill-0", connector.Prefill, Ready, "0"), record("decode-0", connector.Decode, Draining, "1"), record("decode-4", connector.Decode, Starting, "3")},
		Decisions: []*Decided{{Time: now, Want: planner.Pools{Prefill: 1, Decode: 2}, Start: []string{"decode-4"}, Result: inProgress}}, HoldUntil: now.Add(time.Minute), HoldTimes: 2}
	seed, err := json.Marshal(whole)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	for _, change := range [][2]string{{`"hold_times":2`, `"hold_times":-9`}, {`"decode-4"`, `"decode-0"`}, {`"3"`, `"1"`}, {`"draining"`, `"odd"`}, {`"decisions":[`, `"decisions":[null,`},
		{`"role":"decode"`, `"role":"whole"`}, {`"epoch":"20`, `"epoch":"00`}, {`"streams":40`, `"streams":9e18`}, {`"gpus":["3"]`, `"gpus":[]`}, {`"m"`, `"other"`}} {
		f.Add([]byte(strings.ReplaceAll(string(seed), change[0], change[1])))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := decodeState(data, "there")
		if err != nil {
			if !errors.Is(err, errUnreadable) {
				t.Fatalf("refused without the mark of it: %v", err)
			}
			return
		}
		store := &memory{}
		if err := store.Save(t.Context(), s); err != nil {
			return // a time that JSON has no words for
		}
		w := newWorld(t, 5)
		w.startIn, w.endIn = 0, 0
		o := w.operator(testSpec, nil)
		clock := now
		o.now = func() time.Time { clock = clock.Add(500 * time.Millisecond); return clock }
		if err := o.take(t.Context(), store); err != nil {
			t.Fatal(err)
		}
		w.give(60)
		for i := range 40 {
			if i == 20 {
				w.give(0)
			}
			if err := o.tick(t.Context()); err != nil && !strings.Contains(err.Error(), "of a budget of") {
				t.Fatal(err)
			}
			w.names() // looks that no GPU is given twice
		}
		if w.most > w.slots {
			t.Fatalf("%d engines at once", w.most)
		}
		if _, err := store.Load(t.Context()); err != nil {
			t.Fatalf("what was written cannot be read: %v", err)
		}
	})
}

// TestDamagedStates: each is refused with what is wrong, and the planner begins anew with the engines that run.
func TestDamagedStates(t *testing.T) {
	for text, want := range map[string]string{
		`{"version":1,"engines":[{"name":"decode-1","role":"decode","phase":"ready"},{"name":"decode-1","role":"decode","phase":"ready"}]}`: "two engines decode-1",
		`{"version":1,"engines":[{"name":"decode-1","role":"cook","phase":"ready"}]}`:                                                       `the role "cook"`,
		`{"version":1,"engines":[{"name":"decode-1","role":"decode","phase":"asleep"}]}`:                                                    `decode-1 is "asleep"`,
		`{"version":1,"engines":[{"role":"decode","phase":"ready"}]}`:                                                                       "has no name",
		`{"version":1,"decisions":[null]}`:                                                                                                  "a decision is missing",
		`{"version":1,"hold_times":-1}`:                                                                                                     "-1 starts have failed",
		`{"version":1,"epoch":"yesterday"}`:                                                                                                 "parsing time",
		`[]`:                                                                                                                                "cannot unmarshal",
		`{"version":1}{`:                                                                                                                    "after top-level value",
	} {
		if _, err := decodeState([]byte(text), "there"); !errors.Is(err, errUnreadable) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
		synctest.Test(t, func(t *testing.T) {
			w, store := newWorld(t, 4), &memory{data: []byte(text)}
			during(t, w.operator(testSpec, nil), store, func() { w.give(100); time.Sleep(10 * time.Second) })
			w.want("decode-0 decode-1 decode-2 prefill-0")
			if s, err := store.Load(t.Context()); err != nil || len(s.Engines) != 4 {
				t.Errorf("%s: then it has %+v, %v", text, s, err)
			}
		})
	}
}

// TestClocksSetBack: a state of a time to come keeps nobody from planning, and its engines are taken over.
func TestClocksSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(t, 4), &memory{}
		during(t, w.operator(testSpec, nil), store, func() { w.give(100); time.Sleep(10 * time.Second) })
		later := time.Now().Add(1000 * time.Hour)
		s, err := store.Load(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		s.Epoch, s.Saved, s.HoldUntil = later, later, later
		if err := store.Save(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		o := w.operator(testSpec, nil)
		during(t, o, store, func() {
			w.give(0)
			time.Sleep(10 * time.Second)
			w.want("decode-0 prefill-0")
			w.give(100)
			time.Sleep(holdMax)
			w.want("decode-0 decode-1 decode-2 prefill-0") // a wait of before is over when the longest would be
		})
	})
}

// TestOtherFlags: an engine that runs under the name of one of before has the GPUs that it has now.
func TestOtherFlags(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(t, 4), &memory{}
		during(t, w.operator(testSpec, nil), store, func() { w.give(20); time.Sleep(10 * time.Second) })
		w.want("decode-0 decode-1 prefill-0")
		s, err := store.Load(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		s.Engines = append(s.Engines, record("decode-2", connector.Decode, Ready, "3"), record("decode-3", connector.Decode, Ready, "3"), record("decode-4", connector.Decode, Ready))
		for _, r := range s.Engines {
			if r.Name == "decode-1" {
				r.GPUs = []string{"3"}
			}
		}
		if err := store.Save(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		o := w.operator(testSpec, nil)
		during(t, o, store, func() {
			w.give(100)
			time.Sleep(10 * time.Second)
			w.want("decode-0 decode-1 decode-2 prefill-0")
		})
		if got := fmt.Sprint(w.starts); got != "[decode-1 decode-2]" {
			t.Errorf("started %s", got)
		}
		for _, r := range o.Status().Engines {
			if e := w.find(r.Name); e == nil || fmt.Sprint(e.GPUs) != fmt.Sprint(r.GPUs) {
				t.Errorf("%s is noted with the GPUs %v", r.Name, r.GPUs)
			}
		}
	})
}
