package child

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// Main turns this process into a part of a benchmark, if StartPart started it as the one that env names, and never returns
// then: run gets the part's configuration and a context that ends when the process is to stop. who is the name that its
// error begins with. Programs that start parts come here first thing in main.
func Main[C any](env, who string, run func(context.Context, *C) error) {
	doc := os.Getenv(env)
	if doc == "" {
		return
	}
	if err := serve(env, doc, run); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", who, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serve[C any](env, doc string, run func(context.Context, *C) error) error {
	var c C
	if err := json.Unmarshal([]byte(doc), &c); err != nil {
		return fmt.Errorf("read %s: %w", env, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // the parent's end of stdin closes however it ends
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return run(ctx, &c)
}

// Ready tells who started this part that it serves, and what it has to say of itself.
func Ready(v any) error { return json.NewEncoder(os.Stdout).Encode(v) }

// StartPart runs a part of the benchmark, which Main knows by env, in a process of its own, and waits until it has said that it
// is ready. argv is the command line, this binary's when empty; stderr is as of Start.
func StartPart(ctx context.Context, env, name string, argv []string, stderr io.Writer, config, ready any) (*Process, error) {
	if len(argv) == 0 {
		exe, err := os.Executable()
		if err != nil {
			return nil, err
		}
		argv = []string{exe}
	}
	doc, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	p, err := Start(ctx, name, []string{env + "=" + string(doc)}, stderr, argv...)
	if err != nil {
		return nil, err
	}
	if err := p.Ask("", ready); err != nil {
		p.kill()
		return nil, fmt.Errorf("start %s: %w", name, errors.Join(err, p.Stop(0))) // that knows the last of what it said
	}
	return p, nil
}
