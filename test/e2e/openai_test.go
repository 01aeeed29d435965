package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestOpenAIClient runs test/openai, the official Python client under pytest, against the default model.
func TestOpenAIClient(t *testing.T) {
	needAll(t)
	python := clientPython(t)
	c := start(t, options{model: smolModel(t), nodes: 2})
	const key = "sk-of-the-e2e-test"
	keys := filepath.Join(scratch, "keys.txt")
	if err := os.WriteFile(keys, []byte(key+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	keyed := start(t, options{env: []string{"HEADRACE_API_KEYS_FILE=" + keys}})
	var workers []string
	for _, w := range c.view().Workers {
		workers = append(workers, worker{w}.url())
	}
	cmd := exec.Command(python, "-m", "pytest", ".")
	cmd.Dir = filepath.Join("..", "openai")
	cmd.Env = append(os.Environ(), "HEADRACE_E2E=1", "PYTHONDONTWRITEBYTECODE=1",
		"HEADRACE_URL="+c.url()+"/v1", "HEADRACE_WORKERS="+strings.Join(workers, ","),
		"HEADRACE_KEYED_URL="+keyed.url()+"/v1", "HEADRACE_KEY="+key)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("pytest: %v\n%s", err, out)
		return
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	fmt.Println(lines[len(lines)-1]) // the closing line, whatever -v says
}

// clientPython is the interpreter of a virtual environment with the locked packages, made when it is missing.
func clientPython(t *testing.T) string {
	t.Helper()
	lock := filepath.Join("..", "openai", "requirements.txt")
	text, err := os.ReadFile(lock)
	if err != nil {
		t.Fatal(err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(text)
	dir := filepath.Join(cache, "headrace", "venv-"+hex.EncodeToString(sum[:6]))
	python := filepath.Join(dir, "bin", "python")
	done := filepath.Join(dir, "complete")
	if _, err := os.Stat(done); err == nil {
		return python
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("python3", "-m", "venv", dir).CombinedOutput(); err != nil {
		_ = os.RemoveAll(dir)
		t.Fatalf("make a virtual environment (on Debian and Ubuntu: apt-get install -y python3-venv): %v\n%s", err, out)
	}
	install := exec.Command(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "-r", lock)
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("install the client: %v\n%s", err, out)
	}
	if err := os.WriteFile(done, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return python
}
