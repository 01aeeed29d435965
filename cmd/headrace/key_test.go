package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/headrace/headrace/router"
)

func TestKeyNew(t *testing.T) {
	status, out, errOut := call(t, "key", "new", "alice")
	m := regexp.MustCompile(`(hr-[\w-]{43})\n.*(alice sha256:[0-9a-f]{64})\n`).FindStringSubmatch(out)
	if status != exitDone || m == nil || router.KeyLine("alice", m[1]) != m[2] {
		t.Fatalf("status %d, wrote %q and %q", status, out, errOut)
	}
	if _, other, _ := call(t, "key", "new", "alice"); strings.Contains(other, m[1]) {
		t.Error("the same key twice")
	}
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte("# ours"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := "# ours\n"
	for range 2 {
		status, out, errOut = call(t, "key", "new", "bob", "--file", file)
		if status != exitDone || strings.Count(out, "\n") != 1 {
			t.Fatalf("status %d, wrote %q and %q", status, out, errOut)
		}
		want += router.KeyLine("bob", strings.TrimSpace(out)) + "\n"
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("the file has %q, %v; want %q", got, err, want)
	}
	fresh := filepath.Join(t.TempDir(), "fresh")
	if status, _, errOut = call(t, "key", "new", "bob", "--file", fresh); status != exitDone {
		t.Fatal(errOut)
	}
	if info, err := os.Stat(fresh); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

func TestKeyHash(t *testing.T) {
	key := strings.Repeat("k", keyCharsMin)
	for in, want := range map[string]string{key + "\n": router.KeyLine("bob", key) + "\n", key[1:]: "", "": "", key + " " + key: ""} {
		var out, errOut bytes.Buffer
		a := &app{out: &out, err: &errOut}
		root := a.root()
		root.SetArgs([]string{"key", "hash", "bob"})
		root.SetIn(strings.NewReader(in))
		if err := root.ExecuteContext(t.Context()); (err == nil) != (want != "") || out.String() != want {
			t.Errorf("of %q it makes %q, %v; want %q", in, out.String(), err, want)
		}
	}
	for _, line := range [][]string{{"key", "new"}, {"key", "new", "a b"}, {"key", "hash", "a/b"}, {"key", "new", "a", "b"}} {
		if status, _, errOut := call(t, line...); status != exitMisused {
			t.Errorf("%v: status %d, %s", line, status, errOut)
		}
	}
}
