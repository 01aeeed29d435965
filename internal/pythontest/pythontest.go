// Package pythontest makes Python environments for tests, of locked packages, below the user's cache. It must not know
// what they are for.
package pythontest

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Venv is the interpreter of a virtual environment with the packages of a lock file (requirements with hashes). It is made when it is
// missing.
func Venv(t *testing.T, lock string) string {
	t.Helper()
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
		t.Fatalf("install what %s lists: %v\n%s", lock, err, out)
	}
	if err := os.WriteFile(done, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return python
}
