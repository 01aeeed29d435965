package supervise

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/headrace/headrace/internal/config"
)

// socketPathMax is what the kernel leaves for a unix socket's path.
const socketPathMax = 107

// DataDir is the folder of one `headrace up`.
//
//	cluster.key   made once, 0600
//	etcd/         the embedded etcd's data
//	logs/         one file a part
//	run/          sockets and state.json, only while it runs
//	lock          held while it runs
//	planner.json  what the planner has begun; removed at an orderly end
type DataDir struct {
	path string
	lock *os.File
}

// DefaultDataDir is headrace in the user's folder for state.
func DefaultDataDir() (string, error) {
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "headrace"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find a place for data (use --data-dir): %w", err)
	}
	return filepath.Join(home, ".local", "state", "headrace"), nil
}

// OpenDataDir makes the folder, takes its lock and clears what a killed predecessor left in run/.
func OpenDataDir(path string) (_ *DataDir, err error) {
	if path, err = filepath.Abs(path); err != nil {
		return nil, fmt.Errorf("open data folder: %w", err)
	}
	d := &DataDir{path: path}
	if longest := d.Socket("node-99"); len(longest) > socketPathMax {
		return nil, config.Misused(fmt.Errorf("data folder %s: its path is %d characters too long for a unix socket; choose a shorter --data-dir", path, len(longest)-socketPathMax))
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make data folder: %w", err)
	}
	if err := d.takeLock(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := os.RemoveAll(d.run()); err != nil {
		return nil, fmt.Errorf("clear data folder: %w", err)
	}
	for _, dir := range []string{d.run(), d.Logs()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make data folder: %w", err)
		}
	}
	return d, nil
}

func (d *DataDir) run() string { return filepath.Join(d.path, "run") }

// Logs, Etcd, Key and Socket say where things are.
func (d *DataDir) Logs() string              { return filepath.Join(d.path, "logs") }
func (d *DataDir) Etcd() string              { return filepath.Join(d.path, "etcd") }
func (d *DataDir) Key() string               { return filepath.Join(d.path, "cluster.key") }
func (d *DataDir) Planner() string           { return filepath.Join(d.path, "planner.json") }
func (d *DataDir) Socket(node string) string { return filepath.Join(d.run(), node+".sock") }

func statePath(dir string) string { return filepath.Join(dir, "run", "state.json") }

func (d *DataDir) takeLock() error {
	path := filepath.Join(d.path, "lock")
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return fmt.Errorf("lock data folder: %w", err)
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			holder := make([]byte, 16)
			n, _ := f.Read(holder)
			_ = f.Close()
			if errors.Is(err, syscall.EWOULDBLOCK) {
				return fmt.Errorf("data folder %s is in use by process %s; stop it or choose another --data-dir", d.path, strings.TrimSpace(string(holder[:n])))
			}
			return fmt.Errorf("lock data folder: %w", err)
		}
		// Its holder removes the file at its end: what was locked may be a file that nobody finds any more.
		mine, err1 := f.Stat()
		now, err2 := os.Stat(path)
		if err1 == nil && err2 == nil && os.SameFile(mine, now) {
			d.lock = f
			err := f.Truncate(0)
			if err == nil {
				_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
			}
			return err
		}
		_ = f.Close()
	}
}

// Close removes what was there only for this run and gives the lock back.
func (d *DataDir) Close() error {
	if d.lock == nil {
		return nil
	}
	err := errors.Join(os.RemoveAll(d.run()), os.Remove(d.lock.Name()), d.lock.Close())
	d.lock = nil
	if err != nil {
		return fmt.Errorf("clear data folder: %w", err)
	}
	return nil
}

// State is what a running `headrace up` tells others by its state file and --ready-file.
type State struct {
	PID      int               `json:"pid"`
	URL      string            `json:"url"`      // http://host:port that serves /v1
	Endpoint string            `json:"endpoint"` // the same with /v1, as OpenAI clients want it
	Admin    string            `json:"admin"`    // http://host:port of the router's own pages
	Model    string            `json:"model"`    // as clients call it
	Etcd     string            `json:"etcd"`     // endpoints, with commas between them
	DataDir  string            `json:"data_dir"`
	PIDs     map[string]int    `json:"pids"`    // by name, "up" is the supervisor
	Upgrade  Upgrade           `json:"upgrade"` // the last one, or the one under way
	Nodes    map[string]string `json:"nodes"`   // http://host:port of each node daemon's own pages, by name
}

// ReadState reads the state file in a data folder; fs.ErrNotExist when nothing runs there.
func ReadState(dir string) (*State, error) {
	data, err := os.ReadFile(statePath(dir))
	if err != nil {
		return nil, fmt.Errorf("read state of headrace up: %w", err)
	}
	var s State
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("read %s: %w", statePath(dir), err)
	}
	if s.PID <= 0 || errors.Is(syscall.Kill(s.PID, 0), syscall.ESRCH) {
		return nil, fmt.Errorf("read state of headrace up: process %d is gone: %w", s.PID, fs.ErrNotExist)
	}
	return &s, nil
}

// writeJSON replaces path as a whole, so that no reader sees half of it.
func writeJSON(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, append(data, '\n'), 0o600); err != nil {
		_ = os.Remove(tmp) // half of it helps nobody, least on a full disk
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// WriteReady writes the ready file of a part that serves at addr; no path, no file.
func WriteReady(path string, pid int, addr string) error {
	if path == "" {
		return nil
	}
	return writeJSON(path, struct {
		PID int    `json:"pid"`
		URL string `json:"url"`
	}{pid, "http://" + addr})
}
