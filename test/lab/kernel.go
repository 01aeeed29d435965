package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// kernel is Debian's kernel package, unpacked: a kernel that boots and modules for it.
type kernel struct {
	vmlinuz string
	modules map[string]string // file by the module's name, with underscores
}

// fetchKernel gives the kernel of a package, "" for the one that Debian's linux-image-amd64 stands for. It is kept in dir by
// the content of the package. Where apt's lists are missing or older than the archive, they are fetched anew, once.
func fetchKernel(ctx context.Context, dir, pkg string) (*kernel, error) {
	k, err := findKernel(ctx, dir, pkg)
	if err == nil || os.Getuid() != 0 || ctx.Err() != nil {
		return k, err
	}
	fmt.Fprintf(os.Stderr, "lab: %v; fetching apt's lists\n", err)
	if out, uerr := exec.CommandContext(ctx, "apt-get", "update", "-qq").CombinedOutput(); uerr != nil {
		return nil, errors.Join(err, fmt.Errorf("apt-get update: %w: %s", uerr, out))
	}
	return findKernel(ctx, dir, pkg)
}

func findKernel(ctx context.Context, dir, pkg string) (*kernel, error) {
	if pkg == "" {
		out, err := exec.CommandContext(ctx, "apt-cache", "depends", "linux-image-amd64").Output()
		if err != nil {
			return nil, fmt.Errorf("find Debian's kernel (needs apt): %w", err)
		}
		for line := range strings.Lines(string(out)) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "Depends: "); ok && strings.HasPrefix(name, "linux-image-") {
				pkg = name
			}
		}
	}
	if pkg == "" {
		return nil, errors.New("apt does not know linux-image-amd64 (run apt-get update)")
	}
	out, err := exec.CommandContext(ctx, "apt-cache", "show", "--no-all-versions", pkg).Output()
	if err != nil {
		return nil, fmt.Errorf("find package %q (run apt-get update): %w", pkg, err)
	}
	sum := ""
	for line := range strings.Lines(string(out)) {
		if v, ok := strings.CutPrefix(line, "SHA256: "); ok {
			sum = strings.TrimSpace(v)
		}
	}
	if len(sum) != 64 {
		return nil, fmt.Errorf("apt knows no checksum of package %q (run apt-get update)", pkg)
	}
	root := filepath.Join(dir, "kernel-"+sum[:24])
	if _, err := os.Stat(root); err == nil {
		return openKernel(root)
	}
	if err := download(ctx, dir, root, pkg, sum); err != nil {
		return nil, fmt.Errorf("fetch %s: %w", pkg, err)
	}
	return openKernel(root)
}

// download fetches a package, checks it and unpacks it to root.
func download(ctx context.Context, dir, root, pkg, sum string) (err error) {
	fmt.Fprintf(os.Stderr, "lab: fetching %s (once)\n", pkg)
	work, err := os.MkdirTemp(dir, "fetch-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	cmd := exec.CommandContext(ctx, "apt-get", "download", "-qq", pkg)
	cmd.Dir = work
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	debs, err := filepath.Glob(filepath.Join(work, "*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get left %d packages: %w", len(debs), err)
	}
	b, err := os.ReadFile(debs[0])
	if err != nil {
		return err
	}
	if got := sha256.Sum256(b); hex.EncodeToString(got[:]) != sum {
		return fmt.Errorf("the package's checksum is %x, want %s", got, sum)
	}
	fresh := filepath.Join(work, "root")
	if out, err := exec.CommandContext(ctx, "dpkg", "-x", debs[0], fresh).CombinedOutput(); err != nil {
		return fmt.Errorf("unpack: %w: %s", err, out)
	}
	return os.Rename(fresh, root)
}

func openKernel(root string) (*kernel, error) {
	k := &kernel{modules: make(map[string]string)}
	images, err := filepath.Glob(filepath.Join(root, "boot/vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return nil, fmt.Errorf("%s holds %d kernels, need one: remove it and run again", root, len(images))
	}
	k.vmlinuz = images[0]
	err = filepath.WalkDir(filepath.Join(root, "lib/modules"), func(file string, d fs.DirEntry, err error) error {
		if name, _, ok := strings.Cut(d.Name(), ".ko"); ok && err == nil && !d.IsDir() {
			k.modules[strings.ReplaceAll(name, "-", "_")] = file
		}
		return err
	})
	return k, err
}

// load adds modules and what they depend on to an image and gives their paths there, in the order of loading. Modules that
// the kernel has built in are left out.
func (k *kernel) load(m *image, names ...string) ([]string, error) {
	var order []string
	seen := make(map[string]bool)
	var visit func(name string) error
	visit = func(name string) error {
		name = strings.ReplaceAll(name, "-", "_")
		file, there := k.modules[name]
		if seen[name] || !there {
			return nil
		}
		seen[name] = true
		data, err := moduleFile(file)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		depends, err := moduleDepends(data)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		for _, d := range depends {
			if err := visit(d); err != nil {
				return err
			}
		}
		at := "/lib/modules/" + name + ".ko"
		m.put(at, entry{mode: modeFile, data: data})
		order = append(order, at)
		return nil
	}
	for _, name := range names {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// moduleFile reads a module, which newer packages compress.
func moduleFile(file string) ([]byte, error) {
	if strings.HasSuffix(file, ".xz") {
		return exec.Command("xz", "-dc", file).Output()
	}
	return os.ReadFile(file)
}

// moduleDepends reads what depmod would.
func moduleDepends(data []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return nil, errors.New("no .modinfo section")
	}
	info, err := s.Data()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, item := range strings.Split(string(info), "\x00") {
		for _, key := range []string{"depends=", "softdep=pre: "} {
			if v, ok := strings.CutPrefix(item, key); ok {
				names = append(names, strings.FieldsFunc(v, func(r rune) bool { return r == ',' || r == ' ' })...)
			}
		}
	}
	return names, nil
}
