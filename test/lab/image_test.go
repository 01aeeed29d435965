package main

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// An archive as the kernel reads it: see Documentation/driver-api/early-userspace/buffer-format.rst.
func readArchive(t *testing.T, b []byte) map[string][]byte {
	t.Helper()
	out := make(map[string][]byte)
	for {
		if len(b) < 110 || string(b[:6]) != "070701" {
			t.Fatalf("no header before %q", b[:min(len(b), 20)])
		}
		field := func(i int) int {
			n, err := strconv.ParseUint(string(b[6+8*i:14+8*i]), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			return int(n)
		}
		size, nameSize := field(6), field(11)
		name := string(b[110 : 110+nameSize-1])
		at := (110 + nameSize + 3) / 4 * 4
		if name == "TRAILER!!!" {
			return out
		}
		out[name] = b[at : at+size]
		b = b[at+(size+3)/4*4:]
	}
}

func TestImage(t *testing.T) {
	m := newImage()
	for i := range 9 { // names and contents of every alignment
		m.put("/a/b/"+strings.Repeat("x", i+1), entry{mode: modeFile, data: bytes.Repeat([]byte{'d'}, i)})
	}
	var b bytes.Buffer
	if err := m.write(&b); err != nil {
		t.Fatal(err)
	}
	got := readArchive(t, b.Bytes())
	for i := range 9 {
		if d, there := got["a/b/"+strings.Repeat("x", i+1)]; !there || len(d) != i {
			t.Errorf("file %d: %q, %v", i, d, there)
		}
	}
	for _, dir := range []string{"a", "a/b", "proc"} {
		if _, there := got[dir]; !there {
			t.Errorf("no directory %s", dir)
		}
	}
}

func TestProgramBringsItsLibraries(t *testing.T) {
	if _, err := os.Stat("/bin/sh"); err != nil || runtime.GOOS != "linux" || findLibrary("libc.so.6") == "" {
		t.Skip("no glibc here")
	}
	m := newImage()
	if err := m.program("/bin/sh", "/bin/sh"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"bin/sh", strings.TrimPrefix(findLibrary("libc.so.6"), "/")} {
		if _, there := m.files[want]; !there {
			t.Errorf("no %s", want)
		}
	}
	if err := m.program(filepath.Join(t.TempDir(), "none"), "/bin/none"); err == nil {
		t.Error("a program that does not exist was added")
	}
}
