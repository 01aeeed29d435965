package main

import (
	"bufio"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// image is the content of an initramfs: what the kernel unpacks into memory and runs /init of.
type image struct {
	files map[string]entry // by path without the leading slash
}

type entry struct {
	mode uint32
	from string // a file to copy, else
	data []byte
}

const (
	modeDir  = 0o040755
	modeExec = 0o100755
	modeFile = 0o100644
)

func newImage() *image {
	m := &image{files: make(map[string]entry)}
	for _, dir := range []string{"bin", "dev", "proc", "sys", "tmp", "run", "etc", "lib64"} {
		m.dir(dir)
	}
	return m
}

func (m *image) dir(name string) {
	for ; name != "." && name != "/" && name != ""; name = path.Dir(name) {
		if _, there := m.files[name]; !there {
			m.files[name] = entry{mode: modeDir}
		}
	}
}

func (m *image) put(name string, e entry) {
	name = strings.TrimPrefix(name, "/")
	m.dir(path.Dir(name))
	m.files[name] = e
}

// libraryDirs is where libraries lie on the host; in the machine they lie in the same places.
var libraryDirs = []string{
	"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib", "/usr/lib",
}

// program adds a program of the host, with the libraries that it names.
func (m *image) program(from, name string) error {
	m.put(name, entry{mode: modeExec, from: from})
	return m.needs(from)
}

// library adds a library that is opened at run time, under its own path.
func (m *image) library(file string) error {
	if _, there := m.files[strings.TrimPrefix(file, "/")]; there {
		return nil
	}
	m.put(file, entry{mode: modeExec, from: file})
	return m.needs(file)
}

// tree adds a file, or a folder with all that is in it.
func (m *image) tree(from, to string) error {
	return filepath.WalkDir(from, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := os.Stat(file)
		if err != nil || !info.Mode().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(from, file)
		if err != nil {
			return err
		}
		mode := uint32(modeFile)
		if info.Mode()&0o111 != 0 {
			mode = modeExec
		}
		m.put(path.Join(to, filepath.ToSlash(rel)), entry{mode: mode, from: file})
		return nil
	})
}

// verbs adds libibverbs, which we open at run time, and the provider of soft RoCE, which it opens at run time.
func (m *image) verbs() error {
	m.put("/etc/libibverbs.d/rxe.driver", entry{mode: modeFile, data: []byte("driver rxe\n")})
	lib := findLibrary("libibverbs.so.1")
	if lib == "" {
		return errors.New("libibverbs.so.1 is not here: let scripts/deps.sh lab install it")
	}
	if err := m.library(lib); err != nil {
		return err
	}
	for _, dir := range libraryDirs[:2] {
		found, err := filepath.Glob(filepath.Join(dir, "libibverbs/librxe-rdmav*.so"))
		if err != nil {
			return err
		}
		for _, lib := range found {
			if err := m.library(lib); err != nil {
				return err
			}
		}
	}
	return nil
}

// needs adds what a program or library is linked with, and the dynamic linker.
func (m *image) needs(file string) error {
	f, err := elf.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			b, err := io.ReadAll(p.Open())
			if err != nil {
				return err
			}
			linker := strings.TrimRight(string(b), "\x00")
			m.put(linker, entry{mode: modeExec, from: linker})
		}
	}
	names, err := f.ImportedLibraries()
	if err != nil {
		return err
	}
	for _, name := range names {
		found := findLibrary(name)
		if found == "" {
			return fmt.Errorf("%s needs %s, which is not here", file, name)
		}
		if err := m.library(found); err != nil {
			return err
		}
	}
	return nil
}

func findLibrary(name string) string {
	for _, dir := range libraryDirs {
		file := filepath.Join(dir, name)
		if _, err := os.Stat(file); err == nil {
			return file
		}
	}
	return ""
}

// write writes a cpio archive in the "newc" format: see the kernel's Documentation/driver-api/early-userspace.
func (m *image) write(w io.Writer) error {
	b := bufio.NewWriterSize(w, 1<<20)
	ino := 0
	for _, name := range slices.Sorted(maps.Keys(m.files)) {
		e := m.files[name]
		data := e.data
		if e.from != "" {
			var err error
			if data, err = os.ReadFile(e.from); err != nil {
				return err
			}
		}
		ino++
		writeEntry(b, name, e.mode, ino, data)
	}
	writeEntry(b, "TRAILER!!!", 0, 0, nil)
	return b.Flush()
}

// writeEntry leaves errors to the writer's Flush.
func writeEntry(b *bufio.Writer, name string, mode uint32, ino int, data []byte) {
	const header = 110
	fmt.Fprintf(b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	fmt.Fprintf(b, "%s\x00%s%s%s", name, zeros(header+len(name)+1), data, zeros(len(data)))
}

// zeros is what fills n bytes up to a multiple of 4.
func zeros(n int) string { return "\x00\x00\x00"[:(4-n%4)%4] }

func (m *image) writeFile(name string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(m.write(f), f.Close())
}
