package config

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Size is a number of bytes, written as 512MiB, 1.5G or 1048576. It is a flag's value.
type Size uint64

var sizeUnits = []struct {
	suffix string
	bytes  float64
}{
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40},
	{"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"tb", 1e12},
	// A bare letter is what tools for memory mean by it.
	{"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}, {"t", 1 << 40},
	{"b", 1},
}

// ParseSize reads a Size.
func ParseSize(s string) (Size, error) {
	number, unit := strings.ToLower(strings.TrimSpace(s)), 1.0
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	if n, err := strconv.ParseUint(number, 10, 64); err == nil && float64(n)*unit < math.MaxInt64 {
		return Size(n * uint64(unit)), nil
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || v < 0 || !(v*unit < math.MaxInt64) || strings.ContainsAny(number, "xpin") {
		return 0, fmt.Errorf("%q is no size; write 512MiB, 2GiB or a number of bytes", s)
	}
	return Size(v * unit), nil
}

// Set reads a flag's text.
func (s *Size) Set(text string) error {
	v, err := ParseSize(text)
	if err == nil {
		*s = v
	}
	return err
}

// String writes the size in the largest binary unit that leaves it whole.
func (s *Size) String() string {
	v := uint64(*s)
	for i := 3; i >= 0; i-- {
		if unit := uint64(sizeUnits[i].bytes); v >= unit && v%unit == 0 {
			return fmt.Sprintf("%d%siB", v/unit, strings.ToUpper(sizeUnits[i].suffix[:1]))
		}
	}
	return strconv.FormatUint(v, 10)
}

// Type names the value in --help.
func (s *Size) Type() string { return "size" }

const keyBytes = 32

// ReadKey reads a cluster key: 64 hex digits, readable by its owner alone.
func ReadKey(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read cluster key: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("read cluster key: %s is open to others (%04o); chmod 600 it", path, info.Mode().Perm())
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read cluster key: %w", err)
	}
	key, err := hex.DecodeString(string(bytes.TrimSpace(data)))
	if err != nil || len(key) != keyBytes {
		return nil, fmt.Errorf("read cluster key: %s does not hold %d hex digits; make one with: openssl rand -hex %d", path, 2*keyBytes, keyBytes)
	}
	return key, nil
}

// EnsureKey reads the cluster key at path and makes it first when there is none.
func EnsureKey(path string) ([]byte, error) {
	key, err := ReadKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	key = make([]byte, keyBytes)
	_, _ = rand.Read(key) // never fails
	// By way of a second name, so that nobody ever reads half a key.
	tmp, err := os.CreateTemp(filepath.Dir(path), ".key-*") // 0600
	if err != nil {
		return nil, fmt.Errorf("make cluster key: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(hex.EncodeToString(key) + "\n")
	if err = errors.Join(err, tmp.Close()); err != nil {
		return nil, fmt.Errorf("make cluster key: %w", err)
	}
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make cluster key: %w", err)
	}
	return ReadKey(path)
}

// NewLogger makes a part's logger from --log-level and --log-format.
func NewLogger(w *os.File, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level %q is not known; use debug, info, warn or error", level)
	}
	opts := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	default:
		return nil, fmt.Errorf("log format %q is not known; use text or json", format)
	}
}

// CacheDir is where downloads go: headrace below the user's cache folder.
func CacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache folder (set XDG_CACHE_HOME): %w", err)
	}
	return filepath.Join(dir, "headrace"), nil
}
