package node

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestListenSocket(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	path := filepath.Join(dir, "node.sock")
	s, err := listenSocket(path)
	if err != nil {
		t.Fatal(err)
	}
	for p, want := range map[string]os.FileMode{dir: 0o700, path: 0o600} {
		if st, err := os.Stat(p); err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: mode %v, want %v (%v)", p, st.Mode(), want, err)
		}
	}
	if _, err := listenSocket(path); err == nil || !strings.Contains(err.Error(), "another daemon (pid ") {
		t.Errorf("live daemon's socket: %v", err)
	}
	if c, err := net.Dial("unix", path); err != nil {
		t.Error(err)
	} else {
		_ = c.Close()
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("socket left behind: %v", err)
	}
}

func TestListenSocketReplacesADeadDaemons(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close() // as a killed process leaves it
	s, err := listenSocket(path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if c, err := net.Dial("unix", path); err != nil {
		t.Error(err)
	} else {
		_ = c.Close()
	}
}

func TestListenSocketRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		file: "not a socket", filepath.Join(open, "s"): "others can write",
		filepath.Join(dir, strings.Repeat("x", 120)): "longer than unix sockets allow",
	} {
		if s, err := listenSocket(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v; want %q", path, s, err, want)
		}
	}
}

func TestUIDAllowed(t *testing.T) {
	for _, c := range []struct {
		uid  uint32
		want bool
	}{{1000, true}, {0, true}, {1001, false}, {1002, true}} {
		if got := uidAllowed(c.uid, 1000, []uint32{1002}); got != c.want {
			t.Errorf("uid %d: %v", c.uid, got)
		}
	}
}

// listenSocket prepares and publishes.
func listenSocket(path string) (*socket, error) {
	s, err := prepareSocket(path, nil)
	if err != nil {
		return nil, err
	}
	return s, s.publish()
}
