package supervise

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A log that the disk has no room for loses lines, says how many, and goes on.
func TestLogOnAFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("mount a small file system: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	s, err := openLog(dir, "part", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	line := []byte(strings.Repeat("x", 999))
	for range 200 {
		s.write(line)
	}
	if s.lost == 0 {
		t.Fatal("nothing was lost")
	}
	if err := writeJSON(filepath.Join(dir, "state.json"), strings.Repeat("y", 32<<10)); err == nil {
		t.Error("a full disk took a file")
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.tmp")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if s.lastLine() != string(line) {
		t.Error("the last line is not known")
	}
	// Room again, as when the file is taken away and a new one begun.
	s.mu.Lock()
	_ = s.file.Close()
	s.file, s.retry = nil, time.Time{}
	s.mu.Unlock()
	if err := os.Remove(filepath.Join(dir, "part.log")); err != nil {
		t.Fatal(err)
	}
	s.write([]byte("after"))
	data, err := os.ReadFile(filepath.Join(dir, "part.log"))
	if err != nil || !strings.Contains(string(data), "lines of this log were lost") || !strings.HasSuffix(string(data), "after\n") {
		t.Errorf("%v\n%s", err, data)
	}
	if s.lost != 0 {
		t.Errorf("%d lines still count as lost", s.lost)
	}
}
