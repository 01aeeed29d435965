// Package cudatest helps tests of what uses a GPU: it builds a stand-in for the CUDA driver, for faults and sequences of
// calls that a real one will not give, and it skips by name what only a real GPU can show.
package cudatest

import (
	"crypto/sha256"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

//go:embed standin/libcuda.c
var source []byte

// Environment of the stand-in.
const (
	Faults        = "CUDA_STANDIN_FAULTS"  // "cuMemAlloc_v2=2,..."
	Log           = "CUDA_STANDIN_LOG"     // the file that calls are appended to
	Devices       = "CUDA_STANDIN_DEVICES" // how many there are
	NoDMABuf      = "CUDA_STANDIN_NO_DMABUF"
	SegmentsApart = "CUDA_STANDIN_SEGMENTS_APART" // it exports one segment at a time
)

// Build compiles a stand-in and gives its path. The defines make it lack functions: LACKS_EXPORT, LACKS_RETAIN, OLD.
func Build(t testing.TB, defines ...string) string {
	t.Helper()
	cc := compiler()
	if cc == "" {
		t.Skip("no C compiler to build the stand-in for the CUDA driver with")
	}
	args := []string{"-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"}
	for _, d := range defines {
		args = append(args, "-D"+d)
	}
	built := cached(fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "%s %q %s", cc, args, source))))
	if built != "" {
		if _, err := os.Stat(built); err == nil {
			return built
		}
	}
	dir := t.TempDir()
	c, so := filepath.Join(dir, "libcuda.c"), filepath.Join(dir, "libcuda.so.1")
	if err := os.WriteFile(c, source, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, append(args, "-o", so, c)...).CombinedOutput(); err != nil {
		t.Fatalf("build the stand-in: %v\n%s", err, out)
	}
	return keep(so, built)
}

// cached is where a stand-in is kept, by what it is built from; "" where nothing can be kept.
func cached(sum string) string {
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	dir = filepath.Join(dir, "headrace", "cuda-standin")
	if os.MkdirAll(dir, 0o700) != nil {
		return ""
	}
	return filepath.Join(dir, sum[:24]+".so")
}

// keep puts a stand-in there whole, whoever else does so at the same time.
func keep(so, built string) string {
	if built == "" {
		return so
	}
	b, err := os.ReadFile(so)
	if err != nil {
		return so
	}
	f, err := os.CreateTemp(filepath.Dir(built), ".new")
	if err != nil {
		return so
	}
	_, err = f.Write(b)
	if cerr := f.Close(); err != nil || cerr != nil || os.Rename(f.Name(), built) != nil {
		_ = os.Remove(f.Name())
		return so
	}
	return built
}

func compiler() string {
	for _, cc := range []string{os.Getenv("CC"), "gcc", "cc", "clang"} {
		if cc == "" {
			continue
		}
		if p, err := exec.LookPath(cc); err == nil {
			return p
		}
	}
	return ""
}

// Calls runs f with the stand-in's log on, and gives what it called.
func Calls(t *testing.T, f func()) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "calls")
	t.Setenv(Log, file)
	f()
	t.Setenv(Log, "")
	b, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var calls []string
	for l := range strings.Lines(string(b)) {
		calls = append(calls, strings.TrimSpace(l))
	}
	return calls
}

// NeedGPU skips a test where there is no GPU, with the reason. With HEADRACE_GPU set, as `make gpu` does, that is a failure.
func NeedGPU(t testing.TB, why string) {
	t.Helper()
	switch {
	case why == "":
	case os.Getenv("HEADRACE_GPU") != "":
		t.Fatalf("no GPU: %s", why)
	default:
		t.Skipf("no GPU: %s", why)
	}
}
