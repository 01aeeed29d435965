package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// startOracle runs one worker by itself: no registry, no daemon, no router.
func startOracle(exe, model, dir string) (*oracle, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "oracle.log"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	ready := filepath.Join(dir, "ready.json")
	cmd := exec.Command(exe, "worker", "--model", model, "--listen", "127.0.0.1:0", "--ready-file", ready)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var said readyFile
	err = poll(time.Minute, func() error {
		if !alive(cmd.Process.Pid) {
			return errors.New("it has ended")
		}
		data, err := os.ReadFile(ready)
		if err != nil {
			return err
		}
		return json.Unmarshal(data, &said)
	})
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		text, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("start the reference worker: %w\n%s", err, text)
	}
	return &oracle{url: said.URL, cmd: cmd, seen: map[string]*answer{}}, nil
}
