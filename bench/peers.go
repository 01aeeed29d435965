package bench

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/headrace/headrace/bench/child"
	"github.com/headrace/headrace/internal/config"
)

//go:embed peers
var embedded embed.FS

// Drivers are those that come with this package: Mooncake and NIXL. What is in such a folder, and what a driver answers,
// says peers/peer.py.
func Drivers() fs.FS {
	sub, err := fs.Sub(embedded, "peers")
	if err != nil {
		panic(err) // the folder is part of the binary
	}
	return sub
}

// peer is another transfer engine, in two processes that are stopped while it is not its turn: some poll without rest.
type peer struct {
	name, what string
	helper     *child.Process
	region     int64
}

const driverPrefix = "driver_"

// startPeers starts every driver that can do the transport.
func (s *session) startPeers(ctx context.Context, transport string) error {
	if s.o.Peers == nil {
		return nil
	}
	python, dir, err := s.installPeers(ctx)
	if err != nil {
		if ctx.Err() == nil {
			s.note("peers: not measured, %v", err)
			return nil
		}
		return err
	}
	drivers, err := filepath.Glob(filepath.Join(dir, driverPrefix+"*.py"))
	if err != nil {
		return err
	}
	for _, driver := range drivers {
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(driver), driverPrefix), ".py")
		fmt.Fprintf(s.o.Progress, "starting %s over %s\n", name, transport)
		h, err := child.Start(ctx, name, []string{"PYTHONDONTWRITEBYTECODE=1"}, nil, python, driver, transport, strconv.FormatInt(s.o.Region, 10))
		if err != nil {
			return err
		}
		p := &peer{name: name, helper: h, region: s.o.Region}
		var hello struct{ What, Error string }
		if err := h.Ask("", &hello); err != nil || hello.Error != "" {
			_ = h.Stop(helperPatience)
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			s.note("%s over %s: not measured, %v", name, transport, errors.Join(err, orNil(hello.Error)))
			continue
		}
		p.what = hello.What
		p.signal(syscall.SIGSTOP)
		s.peers = append(s.peers, p)
	}
	return nil
}

func orNil(text string) error {
	if text == "" {
		return nil
	}
	return errors.New(text)
}

func (s *session) stopPeers() {
	for _, p := range s.peers {
		p.signal(syscall.SIGCONT)
		_ = p.helper.Stop(helperPatience)
	}
	s.peers = nil
}

func (p *peer) signal(sig syscall.Signal) { _ = syscall.Kill(-p.helper.Group(), sig) }

// ask lets the peer run for one request.
func (p *peer) ask(request map[string]any, answer any) error {
	line, err := json.Marshal(request)
	if err != nil {
		return err
	}
	p.signal(syscall.SIGCONT)
	defer p.signal(syscall.SIGSTOP)
	var raw json.RawMessage
	if err := p.helper.Ask(string(line), &raw); err != nil {
		return err
	}
	var failed struct{ Error string }
	if err := json.Unmarshal(raw, &failed); err == nil && failed.Error != "" {
		return errors.New(failed.Error)
	}
	return json.Unmarshal(raw, answer)
}

// verifyPeer has the peer move and compare everything once, which also warms it.
func (s *session) verifyPeer(p *peer, block int) error {
	var v struct {
		Bytes int64 `json:"verified_bytes"`
	}
	if err := p.ask(map[string]any{"op": "verify", "block": block}, &v); err != nil {
		return err
	}
	if v.Bytes != p.region {
		return fmt.Errorf("it verified %d of %d bytes", v.Bytes, p.region)
	}
	return nil
}

func (p *peer) move(block, batch int, bytes int64) (m Measure, err error) {
	if err = p.ask(map[string]any{"op": "move", "block": block, "batch": batch, "bytes": bytes}, &m); err == nil && m.Seconds <= 0 {
		err = errors.New("it took no time")
	}
	return m, err
}

func (p *peer) latency(block, count int) ([]float64, error) {
	var v struct{ Micros []float64 }
	err := p.ask(map[string]any{"op": "latency", "block": block, "count": count}, &v)
	if err == nil && len(v.Micros) == 0 {
		err = errors.New("it gave no samples")
	}
	return v.Micros, err
}

// installPeers unpacks the drivers and gives a Python that has what they import: a virtual environment in the user's
// cache, named after the requirements' digest, which pip fills once.
func (s *session) installPeers(ctx context.Context) (python, dir string, err error) {
	dir = filepath.Join(s.dir, "peers")
	if _, err := os.Stat(dir); err != nil {
		if err := os.CopyFS(dir, s.o.Peers); err != nil {
			return "", "", fmt.Errorf("unpack the peers' drivers: %w", err)
		}
	}
	lock := filepath.Join(dir, "requirements.txt")
	text, err := os.ReadFile(lock)
	if err != nil {
		return "", "", err
	}
	python, err = Venv(ctx, text, s.o.Progress, "--no-deps")
	return python, dir, err
}

// Venv gives the Python of a virtual environment in the user's cache that has what the requirements name. It is named after
// their digest; pip, called with flags beside its own, fills it once.
func Venv(ctx context.Context, requirements []byte, progress io.Writer, flags ...string) (python string, err error) {
	cache, err := config.CacheDir()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(requirements)
	venv := filepath.Join(cache, "peers-"+hex.EncodeToString(sum[:6]))
	python = filepath.Join(venv, "bin", "python")
	complete := filepath.Join(venv, "complete")
	if _, err := os.Stat(complete); err == nil {
		return python, nil
	}
	fmt.Fprintf(progress, "installing the peers into %s, once\n", venv)
	if err := errors.Join(os.RemoveAll(venv), os.MkdirAll(cache, 0o755)); err != nil {
		return "", err
	}
	if said, err := output(ctx, "python3", "-m", "venv", venv); err != nil {
		return "", fmt.Errorf("make a virtual environment (run: apt-get install -y python3-venv): %w: %s", err, said)
	}
	lock := filepath.Join(venv, "requirements.txt")
	if err := os.WriteFile(lock, requirements, 0o644); err != nil {
		return "", err
	}
	argv := append([]string{python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--require-hashes", "-r", lock}, flags...)
	if said, err := output(ctx, argv...); err != nil {
		return "", fmt.Errorf("install the peers with pip (Python 3.11 or newer is needed): %w: %s", err, said)
	}
	return python, os.WriteFile(complete, nil, 0o644)
}

// output runs a command and gives the end of what it said.
func output(ctx context.Context, argv ...string) (string, error) {
	cmd := child.OwnGroup(exec.CommandContext(ctx, argv[0], argv[1:]...))
	said := &child.Tail{}
	cmd.Stdout, cmd.Stderr = said, said
	err := cmd.Run()
	return said.Last(), err
}
