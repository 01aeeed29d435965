package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestReleaseSource(t *testing.T) {
	const targets = "DEP-11 Debian bookworm main http://a/\nPackages Debian bookworm-updates main http://b/\nPackages Other bookworm main http://c/\n" +
		"Packages Debian bookworm contrib http://d/\nPackages Debian bookworm main http://e/\n"
	if uri, ok := releaseSource(targets, "bookworm"); !ok || uri != "http://e/" {
		t.Errorf("%q, %v", uri, ok)
	}
	if uri, ok := releaseSource(targets, "trixie"); ok {
		t.Errorf("trixie comes from %q", uri)
	}
}

func TestParseURIs(t *testing.T) {
	a, b := strings.Repeat("a", 64), strings.Repeat("b", 64)
	list := parseURIs("Reading...\n'http://x/q_2%2b1.deb' q_1%3a2+1_amd64.deb 100 SHA256:" + b + "\n'http://x/d.deb' d_1_all.deb 7 SHA256:" + a + "\n'http://x/e.deb' e_1_all.deb 7 \n")
	if want := []deb{{"d_1_all.deb", a}, {"q_1%3a2+1_amd64.deb", b}}; !slices.Equal(list, want) {
		t.Errorf("%v", list)
	}
	if key(list) == key(list[:1]) {
		t.Error("the key does not depend on the packages")
	}
}

func TestUnpackedEmulator(t *testing.T) {
	root := t.TempDir()
	if _, err := openEmulator(root); err == nil {
		t.Error("an empty folder is a QEMU")
	}
	for _, f := range []string{"usr/bin/" + qemuProgram, "usr/share/seabios/bios.bin", "usr/lib/x86_64-linux-gnu/libx.so"} {
		f = filepath.Join(root, f)
		if err := os.MkdirAll(filepath.Dir(f), 0o755); err != nil {
			t.Fatal(err)
		}
		// It has a device igb and no other.
		if err := os.WriteFile(f, []byte("#!/bin/sh\ncase \"$*\" in *'-device igb,help') echo igb options: ;; esac\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	e, err := openEmulator(root)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(e.args, filepath.Join(root, "usr/share/seabios")) || !strings.Contains(e.env[0], filepath.Join(root, "usr/lib/x86_64-linux-gnu")) {
		t.Errorf("%+v", e)
	}
	if !e.has(t.Context(), "igb") || e.has(t.Context(), "igc") {
		t.Error("it has another device than it has")
	}
}
