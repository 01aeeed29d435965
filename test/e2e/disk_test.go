package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/headrace/headrace/internal/supervise"
)

// TestFullDisk: the data folder has no room left. Requests are served, parts that die come back, upgrades work; with room
// again the logs go on and the state file is true.
func TestFullDisk(t *testing.T) {
	needAll(t)
	dir := filepath.Join(scratch, "disk")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=200m"); err != nil {
		if os.Geteuid() == 0 {
			t.Fatalf("mount a small file system: %v", err)
		}
		t.Skip("needs root to mount a small file system")
	}
	t.Cleanup(func() { _ = errors.Join(syscall.Unmount(dir, syscall.MNT_DETACH), os.Remove(dir)) })
	c := start(t, options{nodes: 2, data: filepath.Join(dir, "d")})
	c.split(waitRestart)
	c.grown()
	fill, err := os.Create(filepath.Join(dir, "fill"))
	if err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(fill, zeros{})
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full after %d bytes: %v", n, err)
	}
	_ = fill.Close()
	o := oracleFor(t, tinyModel(t))
	works := func(what string) {
		t.Helper()
		r := sampled(request{Prompt: freshPrompt(80), MaxTokens: 12, Stream: true}, 1)
		want := o.want(t, r)
		a, err := post(c.url(), r).within(waitHang)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		mustEqual(t, a, want, what)
	}
	works("on a full disk")
	for _, pid := range []int{c.decode().PID, c.nodeOf(c.prefill()).PID, c.view().Routers[0].PID} {
		if err := signal(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		// A router that dies takes the connections with it that it has taken: what is asked after its end is what counts.
		eventually(t, waitRestart, "the process has ended", func() error {
			if alive(pid) {
				return fmt.Errorf("process %d lives", pid)
			}
			return nil
		})
		works("after a kill on a full disk")
		eventually(t, waitRestart, "it is started again", func() error {
			if v := c.view(); len(v.Workers) != 2 || len(v.Nodes) != 2 || len(v.Routers) != 1 {
				return fmt.Errorf("%d workers, %d nodes, %d routers", len(v.Workers), len(v.Nodes), len(v.Routers))
			}
			return nil
		})
		c.split(waitRestart)
	}
	if err := os.Remove(fill.Name()); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitRestart, "the state file is true again", func() error {
		s, err := supervise.ReadState(c.data)
		if err == nil && s.PIDs["decode-0"] != c.decode().PID {
			err = fmt.Errorf("%+v", s.PIDs)
		}
		return err
	})
	works("with room again")
	c.upgrade()
	c.split(waitRestart)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
