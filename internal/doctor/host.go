package doctor

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer/telemetry"
)

// host is what the checks look at: files, and what must be asked by other means.
type host struct {
	root   fs.FS
	verbs  func() cgo.Verbs
	ports  func(device string, ports int) (library, error)
	rlimit func(which int) (unix.Rlimit, error)
	access func(name string) error // whether a file may be read and written
	adjust func() (unix.Timex, int, error)
	pause  func(netdev string) (pauseParam, error)
	pfc    func(netdev string) (pfcState, error)
	bpf    func() bpfAnswers
	cuda   func(kernelModules string) gpus
	seen   func() []telemetry.Capability
	find   func(program string) bool
}

// here is the host that this process runs on.
func here(root fs.FS) *host {
	return &host{
		root: root, verbs: cgo.Probe, ports: askLibrary, adjust: adjtimex, pause: ethtoolPause, pfc: dcbPFC, bpf: askBPF, cuda: askCUDA, seen: telemetry.Probe, find: onPath,
		rlimit: func(which int) (l unix.Rlimit, err error) { return l, unix.Getrlimit(which, &l) },
		access: func(name string) error { return unix.Access(name, unix.R_OK|unix.W_OK) },
	}
}

// onPath looks also where only root's PATH goes.
func onPath(program string) bool {
	dirs := append(strings.Split(os.Getenv("PATH"), ":"), "/usr/sbin", "/sbin", "/usr/bin", "/bin")
	return slices.ContainsFunc(dirs, func(dir string) bool { return unix.Access(path.Join(dir, program), unix.X_OK) == nil })
}

func (h *host) text(name string) string {
	data, err := fs.ReadFile(h.root, strings.TrimPrefix(name, "/"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// number reads a file that holds a number; ok is false where it does not.
func (h *host) number(name string) (n int, ok bool) {
	n, err := strconv.Atoi(h.text(name))
	return n, err == nil
}

func (h *host) exists(name string) bool {
	_, err := fs.Stat(h.root, strings.TrimPrefix(name, "/"))
	return err == nil
}

// list gives the names in a folder, none where there is no such folder.
func (h *host) list(dir string) (names []string) {
	entries, err := fs.ReadDir(h.root, strings.Trim(dir, "/"))
	if err != nil {
		return nil
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// link gives the last part of what a symbolic link points to, "" where there is none.
func (h *host) link(name string) string {
	to, err := fs.ReadLink(h.root, strings.TrimPrefix(name, "/"))
	if err != nil {
		return ""
	}
	return path.Base(to)
}

// field returns a "name : value" line's value in a file, or "".
func (h *host) field(file, name string) string {
	s := bufio.NewScanner(strings.NewReader(h.text(file)))
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		if key, value, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// hasWord tells whether a list of words has that one.
func hasWord(words, word string) bool { return slices.Contains(strings.Fields(words), word) }

// The capabilities that matter here: see capabilities(7).
const (
	capNetAdmin = 12
	capIPCLock  = 14
	capSysAdmin = 21
	capPerfmon  = 38
	capBPF      = 39
)

// capable tells whether this process has a capability.
func (h *host) capable(which ...int) bool {
	set, err := strconv.ParseUint(h.field("proc/self/status", "CapEff"), 16, 64)
	return err == nil && slices.ContainsFunc(which, func(c int) bool { return set&(1<<c) != 0 })
}

// module tells whether a kernel module is loaded or built in, and whether it is there to be loaded.
func (h *host) module(name string) (loaded, there bool) {
	if h.exists("sys/module/" + name) {
		return true, true
	}
	dir := "lib/modules/" + h.text("proc/sys/kernel/osrelease") + "/"
	for _, file := range []string{"modules.dep", "modules.builtin"} {
		for line := range strings.Lines(h.text(dir + file)) {
			ko, _, _ := strings.Cut(path.Base(strings.Fields(line + " -")[0]), ".ko")
			if strings.ReplaceAll(ko, "-", "_") == name {
				return file == "modules.builtin", true
			}
		}
	}
	return false, false
}

// modules is about a host whose kernel has no module of that name to load.
func (h *host) noModule(name string) (remedy, command string) {
	release := h.text("proc/sys/kernel/osrelease")
	remedy = "this kernel (" + release + ") comes without module " + name + ": install the distribution's package with more modules, or boot another kernel"
	switch {
	case strings.Contains(release, "-cloud-"):
		return remedy, "apt-get install -y linux-image-" + release[strings.LastIndex(release, "-")+1:]
	case h.distribution() == "ubuntu":
		return remedy, "apt-get install -y linux-modules-extra-" + release
	case h.distribution() == "rhel":
		return remedy, "dnf install -y kernel-modules-extra-" + release
	}
	return remedy, ""
}

func (h *host) distribution() string {
	words := ""
	for line := range strings.Lines(h.text("etc/os-release")) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && (key == "ID" || key == "ID_LIKE") {
			words += " " + strings.Trim(value, `"'`)
		}
	}
	switch {
	case hasWord(words, "ubuntu"):
		return "ubuntu"
	case hasWord(words, "rhel"), hasWord(words, "fedora"), hasWord(words, "centos"):
		return "rhel"
	case hasWord(words, "suse"), hasWord(words, "opensuse"):
		return "suse"
	}
	return "debian"
}

// install is the command that installs a package, by its names in Debian and in the others.
func (h *host) install(deb, rpm string) string {
	switch h.distribution() {
	case "rhel":
		return "dnf install -y " + rpm
	case "suse":
		return "zypper install -y " + rpm
	}
	return "apt-get install -y " + deb
}

// errno is the part of an error that the kernel gave.
func errno(err error) string {
	var e unix.Errno
	if errors.As(err, &e) {
		return e.Error()
	}
	return err.Error()
}

var native = binary.NativeEndian

// self is the path of this program.
func (h *host) self() string {
	if exe, err := os.Executable(); err == nil {
		return exe
	}
	return "/usr/local/bin/headrace"
}
