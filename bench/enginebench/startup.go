package enginebench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Startup is a worker process from its start to the moment it serves, with an untouched KV cache.
type Startup struct {
	ReadyMs     float64   `json:"ready_ms"` // median
	Rounds      []float64 `json:"rounds"`
	ResidentMB  float64   `json:"resident_mb"`
	WeightsMB   float64   `json:"file_mb"`      // resident pages of files: the model, shared with other workers, and the program
	KVMB        float64   `json:"kv_mb"`        // resident pages of the KV cache, of those lent
	AnonymousMB float64   `json:"anonymous_mb"` // everything else
}

// startWait is how long a worker may take to be ready.
const startWait = 2 * time.Minute

func startup(ctx context.Context, o *Options) (*Startup, error) {
	out := &Startup{}
	for range o.Rounds {
		fmt.Fprintln(o.Progress, "starting a worker")
		if err := out.once(ctx, o); err != nil {
			return nil, fmt.Errorf("start a worker: %w", err)
		}
	}
	out.ReadyMs = median(out.Rounds)
	return out, nil
}

func (s *Startup) once(ctx context.Context, o *Options) (err error) {
	dir, err := os.MkdirTemp("", "headrace-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	ready := filepath.Join(dir, "ready")
	var complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, o.Worker, "worker", "--model", o.Model, "--threads", strconv.Itoa(o.Threads),
		"--listen", "127.0.0.1:0", "--ready-file", ready)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stderr = &complaint
	started := time.Now()
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	poll := time.NewTicker(time.Millisecond)
	defer poll.Stop()
	for {
		if _, err := os.Stat(ready); err == nil {
			break
		}
		select {
		case err := <-ended:
			return fmt.Errorf("it ended: %w: %s", errors.Join(err, ctx.Err()), strings.TrimSpace(complaint.String()))
		case <-poll.C:
		}
	}
	s.Rounds = append(s.Rounds, ms(time.Since(started)))
	err = s.memory(cmd.Process.Pid)
	cancel()
	if end := <-ended; !errors.Is(end, context.Canceled) { // it did not end by the signal just sent
		err = errors.Join(err, end)
	}
	return err
}

// memory reads how much of the process is resident. Other systems than Linux have no such file: zeros.
func (s *Startup) memory(pid int) error {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	fields := map[string]*float64{"VmRSS:": &s.ResidentMB, "RssFile:": &s.WeightsMB, "RssShmem:": &s.KVMB, "RssAnon:": &s.AnonymousMB}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) < 2 || fields[words[0]] == nil {
			continue
		}
		kib, err := strconv.ParseFloat(words[1], 64)
		if err != nil {
			return fmt.Errorf("read %s of a process: %w", words[0], err)
		}
		*fields[words[0]] = kib * 1024 / 1e6
	}
	return lines.Err()
}
