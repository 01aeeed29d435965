package supervise

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/config"
)

// withEngine has the Up of dir run engines of another kind.
func withEngine(t *testing.T, dir string, e Engine) {
	t.Helper()
	data, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "engine.json"), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestUpRunsEnginesOfAnotherKind(t *testing.T) {
	dir := tempDir(t)
	withEngine(t, dir, Engine{Flags: []string{"--engine=x"}, Args: []string{"--own", "a b"}, Whole: true, Start: patience})
	cmd, state := startUp(t, dir)
	if state.PIDs["engine-0"] == 0 || state.PIDs["engine-1"] == 0 {
		t.Errorf("%+v", state.PIDs)
	}
	// The stand-in lists its command line as its model.
	for _, want := range []string{"--role both", "--engine=x", "--stop-timeout", "--parent-fd 3"} {
		if !strings.Contains(state.Model, want) {
			t.Errorf("an engine is started without %s: %s", want, state.Model)
		}
	}
	if !strings.HasSuffix(state.Model, " -- --own a b") {
		t.Errorf("an engine's own arguments are not last: %s", state.Model)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if left := leftovers(dir); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

func TestUpGivesUpWithAnEngineThatCannotStart(t *testing.T) {
	dir := tempDir(t)
	withEngine(t, dir, Engine{Flags: []string{"--dialect", "none"}, Whole: true, Start: patience})
	err := Up(t.Context(), testOptions(dir))
	if err == nil || !strings.Contains(err.Error(), "start engine-") || !strings.Contains(err.Error(), ": the engine died at its start") {
		t.Error(err)
	}
}

func TestEnginesThatDoNotComeUpInTime(t *testing.T) {
	dir := tempDir(t)
	withEngine(t, dir, Engine{Whole: true, Attaches: true, Start: time.Second})
	err := Up(t.Context(), testOptions(dir))
	// On a busy machine other parts take longer than that too.
	if err == nil || !strings.Contains(err.Error(), "not everything was up within 1s; still missing: ") || !strings.Contains(err.Error(), "engine-0, engine-1") {
		t.Error(err)
	}
}

func TestGPUsAreSharedOut(t *testing.T) {
	dir := tempDir(t)
	o := testOptions(dir)
	o.Shapes = map[string]Shape{"prefill": {TensorParallel: 2}}
	o.Engine = &Engine{GPUs: []string{"4", "5", "6", "7"}, Attaches: true}
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, p := range newLayout(o, &DataDir{path: dir}, []string{"e"}, "").plan(nil) {
		if p.kind == "worker" {
			got[p.spec.Name] = option(p.spec.Args, "gpus") + " " + option(p.spec.Args, "tensor-parallel") + " " + p.spec.Args[0]
			if i := slices.Index(p.spec.Args, "--"); i != len(p.spec.Args)-1 {
				t.Errorf("%s ends in %q", p.spec.Name, p.spec.Args)
			}
		}
	}
	if got["prefill-0"] != "4,5 2 engine" || got["decode-0"] != "6  engine" || got["decode-1"] != "7  engine" {
		t.Errorf("%q", got)
	}
}

func TestEnginesThatCannotBeMeant(t *testing.T) {
	for want, change := range map[string]func(*Options){
		"use --prefill 0 --decode 3":                    func(o *Options) { o.Engine = &Engine{Whole: true} },
		"--gpus names 2 GPUs for 3 engines that need 3": func(o *Options) { o.Engine = &Engine{GPUs: []string{"0", "1"}} },
		"at least one of each":                          func(o *Options) { o.Engine, o.Decode = &Engine{}, 0 },
	} {
		o := testOptions(tempDir(t))
		change(o)
		err := o.Validate()
		if err == nil || !strings.Contains(err.Error(), want) || !errors.As(err, new(*config.Misuse)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
