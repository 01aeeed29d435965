package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// emulator is a QEMU: the host's own, or one that is only unpacked.
type emulator struct {
	program string
	args    []string // before all others
	env     []string // beside the process's own
}

const qemuProgram = "qemu-system-x86_64"

var fetching sync.Mutex

// findEmulator gives a QEMU that has a device. Where the host's is older, it is the newer one that Debian makes for the same
// release (its backports), which is fetched like the kernel: unpacked into dir, by the content of its packages, not installed.
func findEmulator(ctx context.Context, dir, device string) (*emulator, error) {
	fetching.Lock() // scenarios that run side by side fetch it once
	defer fetching.Unlock()
	e := &emulator{program: lookup(qemuProgram)}
	if device == "" || e.program != "" && e.has(ctx, device) {
		return e, nil
	}
	e, err := fetchEmulator(ctx, dir)
	if err != nil {
		return nil, fmt.Errorf("this host's QEMU has no device %s, and a newer one cannot be had: %w", device, err)
	}
	if !e.has(ctx, device) {
		return nil, fmt.Errorf("%s has no device %s either", e.program, device)
	}
	return e, nil
}

func (e *emulator) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, e.program, slices.Concat(e.args, args)...)
	cmd.Env = append(os.Environ(), e.env...)
	return cmd
}

// has asks for the device's options. That there are none is no error to QEMU.
func (e *emulator) has(ctx context.Context, device string) bool {
	out, err := e.command(ctx, "-machine", "q35", "-device", device+",help").Output()
	return err == nil && strings.Contains(string(out), device+" options")
}

// backports is apt with a folder and sources of its own: the host's are not touched.
type backports struct {
	dir   string
	suite string
}

// openBackports writes the list of sources: where the host gets its release from, the newer packages lie too.
func openBackports(ctx context.Context, dir string) (*backports, error) {
	codename := ""
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(release)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "VERSION_CODENAME="); ok {
			codename = strings.Trim(v, `"`)
		}
	}
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(CREATED_BY) $(ORIGIN) $(CODENAME) $(COMPONENT) $(REPO_URI)").Output()
	if err != nil {
		return nil, fmt.Errorf("ask apt for its sources: %w", err)
	}
	uri, ok := releaseSource(string(out), codename)
	if !ok {
		return nil, fmt.Errorf("apt knows no source of Debian %s (run apt-get update)", codename)
	}
	b := &backports{dir: filepath.Join(dir, "apt"), suite: codename + "-backports"}
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(b.dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	return b, errors.Join(b.writeSources(uri, codename), b.writeConfig(ctx))
}

func (b *backports) writeSources(uri, codename string) error {
	const keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
	signed := ""
	if exists(keys) {
		signed = "[signed-by=" + keys + "] "
	}
	sources := fmt.Sprintf("deb %s%s %s main\ndeb %s%s %s main\n", signed, uri, codename, signed, uri, b.suite)
	return os.WriteFile(filepath.Join(b.dir, "sources.list"), []byte(sources), 0o644)
}

// writeConfig writes settings in place of the host's, whose hooks would work on the host's folders. How the host reaches
// its sources (a proxy, say) stays.
func (b *backports) writeConfig(ctx context.Context) error {
	acquire, err := exec.CommandContext(ctx, "apt-config", "dump", "--no-empty", "Acquire").Output()
	if err != nil {
		return fmt.Errorf("ask apt for its settings: %w", err)
	}
	settings := []string{
		"Dir::Etc::main", "-", "Dir::Etc::parts", "-", "Dir::Etc::sourcelist", filepath.Join(b.dir, "sources.list"), "Dir::Etc::sourceparts", "-",
		"Dir::Etc::preferences", "-", "Dir::Etc::preferencesparts", "-", "Dir::State::lists", filepath.Join(b.dir, "lists"), "Dir::Cache", filepath.Join(b.dir, "cache"),
		"Debug::NoLocking", "true", "APT::Sandbox::User", "root", "Acquire::Languages", "none", "Acquire::ForceHash", "SHA256",
	}
	text := string(acquire)
	for i := 0; i < len(settings); i += 2 {
		text += fmt.Sprintf("%s %q;\n", settings[i], settings[i+1])
	}
	return os.WriteFile(b.config(), []byte(text), 0o644)
}

func (b *backports) config() string { return filepath.Join(b.dir, "apt.conf") }

// releaseSource finds where a release's main packages come from in what apt lists of its sources.
func releaseSource(targets, codename string) (uri string, ok bool) {
	for line := range strings.Lines(targets) {
		f := strings.Fields(line)
		if len(f) == 5 && f[0] == "Packages" && f[1] == "Debian" && f[2] == codename && f[3] == "main" {
			return f[4], true
		}
	}
	return "", false
}

func (b *backports) apt(ctx context.Context, args ...string) ([]byte, error) {
	var complaints strings.Builder
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "APT_CONFIG="+b.config(), "DEBIAN_FRONTEND=noninteractive")
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("apt-get %s: %w: %s", args[0], err, strings.TrimSpace(complaints.String()))
	}
	return out, err
}

// deb is a package's file.
type deb struct{ name, sum string }

// wanted lists the packages that QEMU would need installed here beside what is.
func (b *backports) wanted(ctx context.Context, more ...string) ([]deb, error) {
	args := append([]string{"install", "-qq", "-y", "--no-install-recommends", "-t", b.suite}, more...)
	out, err := b.apt(ctx, append(args, "qemu-system-x86", "qemu-system-data", "seabios", "ipxe-qemu")...)
	if err != nil {
		return nil, err
	}
	return parseURIs(string(out)), nil
}

var aURI = regexp.MustCompile(`^'[^']+' (\S+\.deb) \d+ SHA256:([0-9a-f]{64})$`)

func parseURIs(text string) (list []deb) {
	for line := range strings.Lines(text) {
		if m := aURI.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			list = append(list, deb{name: m[1], sum: m[2]})
		}
	}
	slices.SortFunc(list, func(x, y deb) int { return strings.Compare(x.name, y.name) })
	return list
}

func fetchEmulator(ctx context.Context, dir string) (*emulator, error) {
	b, err := openBackports(ctx, dir)
	if err != nil {
		return nil, err
	}
	// What was fetched before is used as it is: the lists are not asked for again.
	list, err := b.wanted(ctx, "--print-uris")
	if err != nil || len(list) == 0 {
		if _, err := b.apt(ctx, "update", "-qq"); err != nil {
			return nil, err
		}
		if list, err = b.wanted(ctx, "--print-uris"); err != nil {
			return nil, err
		}
	}
	if len(list) == 0 {
		return nil, errors.New("apt has nothing newer than what is installed")
	}
	root := filepath.Join(dir, "qemu-"+key(list))
	if !exists(root) {
		err := b.unpack(ctx, dir, root, list)
		if err != nil { // the packages may have been replaced by newer ones
			if _, err := b.apt(ctx, "update", "-qq"); err != nil {
				return nil, err
			}
			if list, err = b.wanted(ctx, "--print-uris"); err != nil {
				return nil, err
			}
			if root = filepath.Join(dir, "qemu-"+key(list)); !exists(root) {
				err = b.unpack(ctx, dir, root, list)
			}
		}
		if err != nil {
			return nil, err
		}
	}
	return openEmulator(root)
}

func key(list []deb) string {
	h := sha256.New()
	for _, d := range list {
		fmt.Fprintln(h, d.sum)
	}
	return hex.EncodeToString(h.Sum(nil))[:24]
}

// unpack fetches packages, checks them and unpacks them to root.
func (b *backports) unpack(ctx context.Context, dir, root string, list []deb) (err error) {
	fmt.Fprintf(os.Stderr, "lab: fetching a newer QEMU, %d packages (once)\n", len(list))
	work, err := os.MkdirTemp(dir, "fetch-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	if err := os.MkdirAll(filepath.Join(work, "partial"), 0o755); err != nil {
		return err
	}
	if _, err := b.wanted(ctx, "--download-only", "-o", "Dir::Cache::archives="+work); err != nil {
		return err
	}
	fresh := filepath.Join(work, "root")
	for _, d := range list {
		file := filepath.Join(work, d.name)
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if got := sha256.Sum256(data); hex.EncodeToString(got[:]) != d.sum {
			return fmt.Errorf("checksum of %s is %x, want %s", d.name, got, d.sum)
		}
		if out, err := exec.CommandContext(ctx, "dpkg", "-x", file, fresh).CombinedOutput(); err != nil {
			return fmt.Errorf("unpack %s: %w: %s", d.name, err, out)
		}
	}
	return os.Rename(fresh, root)
}

func openEmulator(root string) (*emulator, error) {
	e := &emulator{program: filepath.Join(root, "usr/bin", qemuProgram)}
	if !exists(e.program) {
		return nil, fmt.Errorf("%s holds no QEMU: remove it and run again", root)
	}
	var libraries []string
	for _, d := range libraryDirs {
		if dir := filepath.Join(root, d); exists(dir) {
			libraries = append(libraries, dir)
		}
	}
	e.env = []string{"LD_LIBRARY_PATH=" + strings.Join(libraries, ":"), "QEMU_MODULE_DIR=" + filepath.Join(root, "usr/lib/x86_64-linux-gnu/qemu")}
	for _, d := range []string{"/usr/share/qemu", "/usr/share/seabios", "/usr/lib/ipxe/qemu"} {
		for _, at := range []string{filepath.Join(root, d), d} { // what the host had already was not fetched
			if exists(at) {
				e.args = append(e.args, "-L", at)
			}
		}
	}
	return e, nil
}
