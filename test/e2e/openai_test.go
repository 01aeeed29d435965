package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/headrace/headrace/internal/pythontest"
)

// TestOpenAIClient runs test/openai, the official Python client under pytest, against the default model.
func TestOpenAIClient(t *testing.T) {
	needAll(t)
	python := pythontest.Venv(t, filepath.Join("..", "openai", "requirements.txt"))
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
