package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// skewed builds the program with other protocol versions.
func skewed(t *testing.T, pkg string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "headrace")
	out, err := exec.Command("go", "build", "-o", path, "-ldflags", "-X github.com/headrace/headrace/"+pkg+".versions=77-78", "github.com/headrace/headrace/cmd/headrace").CombinedOutput()
	if err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return path
}

// TestVersionSkew: parts that do not understand each other say so, once and clearly, and requests are served all the
// same: whole.
func TestVersionSkew(t *testing.T) {
	needAll(t)
	for name, s := range map[string]struct{ pkg, says string }{
		"daemon and daemon": {"transfer/handshake", "of the protocol between daemons"},
		"engine and daemon": {"transfer/node/wire", "of the protocol with engines"},
	} {
		t.Run(name, func(t *testing.T) {
			other := skewed(t, s.pkg)
			dir := t.TempDir()
			own := filepath.Join(dir, "headrace")
			copyFile(t, bin(t), own)
			c := prepare(t, options{nodes: 2})
			c.cmd.Path, c.cmd.Args[0] = own, own
			c.launch()
			c.awaitReady()
			c.grown()
			if err := os.Remove(own); err != nil {
				t.Fatal(err)
			}
			copyFile(t, other, own)
			n := c.nodeOf(c.decode()) // only this one is of the other version now
			c.killNode(n)
			o := oracleFor(t, tinyModel(t))
			for i := range 12 {
				r := sampled(request{Prompt: freshPrompt(80), MaxTokens: 12, Stream: true}, i)
				a, err := post(c.url(), r).within(waitHang)
				if err != nil {
					t.Fatal(err)
				}
				mustEqual(t, a, o.want(t, r), "with daemons or engines of two versions")
			}
			eventually(t, waitRestart, "status says what is wrong", func() error {
				cmd := exec.Command(bin(t), "status", "--data-dir", c.data)
				cmd.Env = c.environ()
				out, err := cmd.CombinedOutput()
				if err != nil || !strings.Contains(string(out), s.says) || !strings.Contains(string(out), "77 to 78") || !strings.Contains(string(out), "upgrade") {
					return fmt.Errorf("%w\n%s", err, out)
				}
				return nil
			})
			for _, log := range c.partLogs() {
				if n := strings.Count(log, s.says); n > 12 {
					t.Errorf("a log speaks of it %d times", n)
				}
			}
		})
	}
}

func (c *cluster) partLogs() []string {
	var logs []string
	paths, _ := filepath.Glob(filepath.Join(c.data, "logs", "*.log"))
	for _, p := range paths {
		data, _ := os.ReadFile(p)
		logs = append(logs, string(data))
	}
	return logs
}
