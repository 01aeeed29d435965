package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// How much is run; see doc.go.
var (
	full     = os.Getenv("HEADRACE_FULL") == "1"
	runAll   = full || os.Getenv("HEADRACE_E2E") == "1"
	withRace = os.Getenv("HEADRACE_RACE") == "1"
	showLogs = os.Getenv("HEADRACE_E2E_LOGS") == "1"
)

// rounds is how often each kill is done.
func rounds() int {
	if full {
		return 20
	}
	return 2
}

// scratch is the run's own folder, removed at the end. Its name is short: paths of unix sockets have 107 bytes at most.
var scratch string

func TestMain(m *testing.M) {
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	var err error
	if scratch, err = os.MkdirTemp("", "hr"); err != nil {
		fmt.Fprintln(os.Stderr, "make a scratch folder:", err)
		return 1
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	code := m.Run()
	oracles.close()
	bounds.print(os.Stdout)
	return code
}

// needAll skips what takes long unless the whole suite was asked for.
func needAll(t *testing.T) {
	t.Helper()
	if !runAll {
		t.Skip("runs under HEADRACE_E2E=1 (make e2e)")
	}
}

var binary = sync.OnceValues(func() (string, error) {
	if bin := os.Getenv("HEADRACE_BIN"); bin != "" {
		return filepath.Abs(bin)
	}
	bin := filepath.Join(scratch, "headrace")
	args := []string{"build", "-o", bin}
	if withRace {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, "github.com/headrace/headrace/cmd/headrace")...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build headrace: %w\n%s", err, out)
	}
	return bin, nil
})

// bin is the path of the binary under test.
func bin(t testing.TB) string {
	t.Helper()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// tinyModel is a small model made from a seed, as a file.
var tinyModelFile = sync.OnceValues(func() (string, error) {
	exe, err := binary()
	if err != nil {
		return "", err
	}
	path := filepath.Join(scratch, "tiny.gguf")
	if out, err := exec.Command(exe, "tinymodel", "--seed", "1", "--out", path).CombinedOutput(); err != nil {
		return "", fmt.Errorf("make the tiny model: %w\n%s", err, out)
	}
	return path, nil
})

func tinyModel(t testing.TB) string {
	t.Helper()
	path, err := tinyModelFile()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// smolModel is the default model's file, which `make model` gets.
func smolModel(t testing.TB) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(cache, "headrace", "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("the default model is missing, get it with `make model`: %v", err)
	}
	return path
}
