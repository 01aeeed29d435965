package router

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const longKey = "hr-0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"

func keysFile(t *testing.T, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAPIKeysFile(t *testing.T) {
	var log bytes.Buffer
	path := keysFile(t, "# ours\n\n k1 \n"+KeyLine("alice", longKey)+"\n"+KeyLine("bob", "k1")+"\n", 0o644)
	ring, err := loadKeys([]string{"k0"}, path, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil || ring.size() != 3 {
		t.Fatalf("loadKeys has %d keys, %v", ring.size(), err)
	}
	if !strings.Contains(log.String(), "keys=1") || strings.Contains(log.String(), "k1 ") {
		t.Errorf("of the plain key it is said: %s", log.String())
	}
	for key, who := range map[string]string{"k0": "sha256:", "k1": "sha256:", longKey: "alice"} {
		if got, ok := ring.admits([]byte("bEARER  " + key + " ")); !ok || !strings.HasPrefix(got, who) {
			t.Errorf("%s is %q, %v; want %q", key, got, ok, who)
		}
	}
	for _, wrong := range []string{"", "Bearer", "Bearer ", "Bearer k", "Bearer k11", "Basic k1", "k1", "Bearer " + KeyLine("alice", longKey)[len("alice "):]} {
		if _, ok := ring.admits([]byte(wrong)); ok {
			t.Errorf("%q is let in", wrong)
		}
	}
	if n := testing.AllocsPerRun(100, func() { ring.admits([]byte("Bearer " + longKey)) }); n > 0 {
		t.Errorf("judging a key allocates %v times", n)
	}
}

func TestAPIKeysRefused(t *testing.T) {
	hash := KeyLine("alice", longKey)[len("alice "):]
	for name, text := range map[string]string{
		"none": "# none\n", "two words": "alice key\n", "no name": hash + "\n", "short hash": "alice sha256:abcd\n", "no digits": "alice sha256:" + strings.Repeat("xy", 32),
		"three words": "alice " + hash + " x\n", "name": "al/ice " + hash, "long name": strings.Repeat("a", 65) + " " + hash, "long line": strings.Repeat("k", 1<<17),
	} {
		_, err := loadKeys(nil, keysFile(t, text, 0o600), slog.New(slog.DiscardHandler))
		if err == nil {
			t.Errorf("%s: no error", name)
		} else if strings.Contains(err.Error(), "key\n") || strings.Contains(err.Error(), hash) {
			t.Errorf("%s: the error shows the line: %v", name, err)
		}
	}
	for _, mode := range []os.FileMode{0o620, 0o602, 0o666} {
		if _, err := loadKeys(nil, keysFile(t, KeyLine("a", "b"), mode), slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "chmod 600") {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
	if _, err := loadKeys(nil, keysFile(t, "", 0o600)+"x", slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a file that is not there is taken")
	}
	if _, err := loadKeys([]string{""}, "", slog.New(slog.DiscardHandler)); err == nil {
		t.Error("an empty key is taken")
	}
}

// lockedBuffer is a bytes.Buffer for several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestAPIKeysFollowed changes the file: the keys change with it, and stay when it cannot be used.
func TestAPIKeysFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &lockedBuffer{}
		path := keysFile(t, KeyLine("alice", "a"), 0o600)
		k, err := newKeys(nil, path, slog.New(slog.NewTextHandler(log, nil)))
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		defer close(done)
		go follow(done, k.look)
		knows := func(keys string) {
			t.Helper()
			time.Sleep(lookPeriod + time.Millisecond) // of the bubble's clock
			synctest.Wait()
			for _, key := range []string{"a", "b", "c"} {
				if _, ok := k.ring.Load().admits([]byte("Bearer " + key)); ok != strings.Contains(keys, key) {
					t.Errorf("key %s is let in: %v, want those of %q", key, ok, keys)
				}
			}
		}
		write := func(text string) {
			t.Helper()
			next := path + ".next"
			if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(next, path); err != nil {
				t.Fatal(err)
			}
		}
		knows("a")
		write(KeyLine("alice", "b"))
		knows("b")
		write("")
		knows("b")
		if !strings.Contains(log.String(), "those known stay") {
			t.Errorf("log: %s", log.String())
		}
		said := log.String()
		knows("b")
		if now := log.String(); now != said {
			t.Errorf("it is said again: %s", now[len(said):])
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		knows("b")
		write(KeyLine("alice", "b") + "\n" + KeyLine("carol", "c"))
		knows("bc")
	})
}

// TestKeysOfRequests looks at which paths ask for a key, and how its name gets to the request.
func TestKeysOfRequests(t *testing.T) {
	path := keysFile(t, KeyLine("alice", "a"), 0o600)
	h := start(t, func(c *Config) { c.APIKeysFile = path }, pair("d1")...)
	status := func(method, target, key string) int {
		got, _ := h.answers(method + " " + target + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer " + key + "\r\n\r\n")
		if len(got) != 1 {
			t.Fatalf("%s %s: %v", method, target, got)
		}
		return got[0]
	}
	for target, want := range map[string]int{"/health": 200, "/metrics": 401, "/v1/models": 401, "/v1/anything": 401, "/tokenize": 401, "/generate": 401, "/v1//../v1/models": 401, "/%76%31/models": 401, "//v1/models": 401} {
		if got := status("GET", target, "b"); got != want {
			t.Errorf("%s without a key: %d, want %d", target, got, want)
		}
	}
	if got := status("GET", "/metrics", "a"); got != 200 {
		t.Errorf("/metrics with a key: %d", got)
	}
	for _, admin := range []string{"/status", "/debug/decisions", "/debug/decisions/x", "/debug/pprof/", "/healthz", "//status", "/%73tatus", "/v1/../status"} {
		if got := status("GET", admin, "a"); got != 404 {
			t.Errorf("%s at the public address: %d", admin, got)
		}
	}
	if err := os.WriteFile(path, []byte(KeyLine("bob", "b")), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := h.r.ReloadKeys(); err != nil {
		t.Fatal(err)
	}
	if got := status("GET", "/v1/models", "b"); got != 200 {
		t.Errorf("a new key: %d", got)
	}
	if got := status("GET", "/v1/models", "a"); got != 401 {
		t.Errorf("a key that was taken away: %d", got)
	}
}

func FuzzKeys(f *testing.F) {
	f.Add(KeyLine("alice", "a")+"\n# b\nplain\n", "Bearer a")
	f.Add("x sha256:00", "bearer  ")
	f.Fuzz(func(t *testing.T, file, authorization string) {
		ring := &keyring{}
		plain, err := readKeys(strings.NewReader(file), ring)
		if err == nil && plain > ring.size() && ring.size() == 0 {
			t.Errorf("%d plain keys, none known", plain)
		}
		who, ok := ring.admits([]byte(authorization))
		if ok && ring.size() > 0 && (who == "" || !strings.HasPrefix(who, keyHashMark) && KeyName(who) != nil) {
			t.Errorf("let in as %q", who)
		}
		if !ok && who != "" {
			t.Errorf("not let in, as %q", who)
		}
	})
}
