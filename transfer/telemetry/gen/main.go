// Command gen builds the eBPF objects of package telemetry by bpf2go. Objects are the same bytes for the same clang, so with
// the one named here the committed files are made anew, and a difference shows. With another clang, or none, they are left
// alone; with another one what is comparable is compared: programs with their types, maps with their sizes, and the types of
// keys and values.
//
//	go run ./gen NAME TARGETS
package main

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
)

// clangMajor is Debian 12's. Another one changes all objects: commit them with it.
const clangMajor = "14"

// cflags leave nothing to the machine: no system headers, no paths.
const cflags = "-O2 -g -Wall -Werror -Wno-unused-function -nostdinc -std=gnu11"

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "gen: usage: gen NAME TARGETS; run make generate")
		os.Exit(2)
	}
	if err := generate(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func generate(name, targets string) error {
	clang, major := findClang()
	strip := findStrip()
	switch {
	case clang == "" || strip == "":
		fmt.Fprintf(os.Stderr, "gen: %s: no clang with llvm-strip here, the committed objects stay; apt-get install -y clang-%s llvm-%s\n", name, clangMajor, clangMajor)
		return nil
	case major == clangMajor:
		return build(name, targets, clang, strip, ".")
	}
	fmt.Fprintf(os.Stderr, "gen: %s: clang %s is not %s, whose objects are committed: comparing programs, maps and types\n", name, major, clangMajor)
	dir, err := os.MkdirTemp("", "headrace-gen-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := build(name, targets, clang, strip, dir); err != nil {
		return err
	}
	return compare(dir, name)
}

var version = regexp.MustCompile(`clang version (\d+)\.`)

// findClang prefers the version whose objects are committed.
func findClang() (program, major string) {
	for _, name := range []string{"clang-" + clangMajor, "clang"} {
		out, err := exec.Command(name, "--version").Output()
		if m := version.FindSubmatch(out); err == nil && m != nil {
			return name, string(m[1])
		}
	}
	return "", ""
}

func findStrip() string {
	for _, name := range []string{"llvm-strip-" + clangMajor, "llvm-strip"} {
		if p, err := exec.LookPath(name); err == nil {
			return p
		}
	}
	return ""
}

func build(name, targets, clang, strip, dir string) error {
	args := []string{"run", "github.com/cilium/ebpf/cmd/bpf2go", "-go-package", "telemetry", "-output-dir", dir, "-cc", clang, "-strip", strip,
		"-cflags", cflags, "-target", targets, name, "bpf/" + name + ".c"}
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), "GOPACKAGE=telemetry")
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("bpf2go of %s: %w", name, err)
	}
	return nil
}

// compare holds objects just built against the committed ones.
func compare(dir, name string) error {
	fresh, err := filepath.Glob(filepath.Join(dir, name+"_*.o"))
	if err != nil || len(fresh) == 0 {
		return fmt.Errorf("nothing was built for %s: %w", name, err)
	}
	var errs []error
	for _, file := range fresh {
		a, err := describe(file)
		if err != nil {
			return err
		}
		b, err := describe(filepath.Base(file))
		if err != nil {
			return err
		}
		if !reflect.DeepEqual(a, b) {
			errs = append(errs, fmt.Errorf("%s does not fit its source: it has\n%s\nand the source gives\n%s\ninstall clang-%s, run make generate and commit", filepath.Base(file),
				strings.Join(b, "\n"), strings.Join(a, "\n"), clangMajor))
		}
		goFile := strings.TrimSuffix(filepath.Base(file), ".o") + ".go"
		own, err := os.ReadFile(goFile)
		if err != nil {
			return err
		}
		theirs, err := os.ReadFile(filepath.Join(dir, goFile))
		if err != nil {
			return err
		}
		if !bytes.Equal(own, theirs) {
			errs = append(errs, fmt.Errorf("%s is not what its source gives; run make generate and commit", goFile))
		}
	}
	return errors.Join(errs...)
}

// describe lists what does not depend on the compiler's version.
func describe(file string) (lines []string, err error) {
	spec, err := ebpf.LoadCollectionSpec(file)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		p := spec.Programs[name]
		lines = append(lines, fmt.Sprintf("program %s: %v %v in %s, %s", name, p.Type, p.AttachType, p.SectionName, p.License))
	}
	for _, name := range slices.Sorted(maps.Keys(spec.Maps)) {
		if m := spec.Maps[name]; !strings.HasPrefix(name, ".") {
			lines = append(lines, fmt.Sprintf("map %s: %v, key %d %v, value %d %v, %d entries, flags %d", name, m.Type, m.KeySize, m.Key, m.ValueSize, m.Value, m.MaxEntries, m.Flags))
		}
	}
	return lines, nil
}
