package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// builder compiles each program once a run.
type builder struct {
	dir   string // for what it makes
	cache string // for what it fetches
	race  bool
	tests map[string]built
	bins  map[string]string
	spent time.Duration
}

type built struct {
	file string
	dir  string // the package's
}

func newBuilder(dir, cache string, race bool) *builder {
	return &builder{dir: dir, cache: cache, race: race, tests: make(map[string]built), bins: make(map[string]string)}
}

// test compiles a package's tests.
func (b *builder) test(ctx context.Context, pkg string) (t built, err error) {
	if t, there := b.tests[pkg]; there {
		return t, nil
	}
	dir, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", pkg).Output()
	if err != nil {
		return t, fmt.Errorf("find package %s: %w", pkg, err)
	}
	t = built{file: filepath.Join(b.dir, testName(pkg)), dir: strings.TrimSpace(string(dir))}
	args := []string{"test", "-c", "-o", t.file}
	if b.race {
		args = append(args, "-race")
	}
	if err := b.compile(ctx, "CGO_ENABLED=1", append(args, pkg)...); err != nil {
		return t, err
	}
	b.tests[pkg] = t
	return t, nil
}

// binary compiles a command.
func (b *builder) binary(ctx context.Context, pkg, name string) (string, error) {
	if file, there := b.bins[name]; there {
		return file, nil
	}
	file, cgo := filepath.Join(b.dir, name), "CGO_ENABLED=1"
	if name == "guest" { // it runs where no library is needed
		cgo = "CGO_ENABLED=0"
	}
	if err := b.compile(ctx, cgo, "build", "-o", file, pkg); err != nil {
		return "", err
	}
	b.bins[name] = file
	return file, nil
}

func (b *builder) compile(ctx context.Context, env string, args ...string) error {
	began := time.Now()
	defer func() { b.spent += time.Since(began) }()
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), env)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}
