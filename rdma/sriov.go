package rdma

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// VFs asks for virtual functions of a physical one.
type VFs struct {
	PF    string // its network interface, RDMA device or PCI address; "": every one with an RDMA port, of those to be used
	Count int
}

// vfsMax is what PCI allows.
const vfsMax = 65535

// ParseVFs reads 2 (of each physical function) and eth0=2.
func ParseVFs(words []string) (list []VFs, err error) {
	for _, word := range words {
		pf, count, named := strings.Cut(word, "=")
		if !named {
			pf, count = "", word
		}
		n, err := strconv.Atoi(count)
		if err != nil || n < 1 || n > vfsMax || named && pf == "" || strings.ContainsAny(pf, "/ \t") {
			return nil, fmt.Errorf("virtual functions %q: use a number for each physical function, as 2, or one of them, as eth0=2", word)
		}
		if slices.ContainsFunc(list, func(v VFs) bool { return v.PF == pf }) {
			return nil, fmt.Errorf("virtual functions %q: its physical function was named before", word)
		}
		list = append(list, VFs{pf, n})
	}
	return list, nil
}

// DefaultStateDir is where daemons write down which virtual functions they made. It is empty after a reboot, as they are gone.
const DefaultStateDir = "/run/headrace/vfs"

// keeper makes virtual functions and puts them back. What one made is written down before it is made, in a file that it keeps
// locked (shared) while it lives: a file that nobody has locked is of a daemon that died, and whoever comes next puts back what
// it says. A daemon and its successor hold the same file; the last one puts back.
type keeper struct {
	sys   sysfs
	dir   string
	write func(file, text string) error // to a file of the kernel's
	links linker
	wait  time.Duration // for drivers to take new functions, and for their links
	ready func(vf, netdev string) bool
	log   *slog.Logger

	held []*grip
}

// linker sets up network interfaces.
type linker interface {
	isUp(name string) (bool, error)
	setUp(name string) error
	setMTU(name string, mtu int) error
	addAddress(name string, a netip.Prefix) error
}

// grip is a physical function whose virtual ones this daemon holds.
type grip struct {
	record
	file *os.File // locked
}

// record is what is written down.
type record struct {
	PF    string    `json:"pf"`
	Count int       `json:"count"`
	Boot  string    `json:"boot"`
	Mark  string    `json:"mark"` // tells these functions from ones that somebody makes later; "" while they are being made
	PID   int       `json:"pid"`
	Made  time.Time `json:"made"`
}

const (
	vfWait   = 30 * time.Second // a function that meets its card in a reset is reset by igbvf ten seconds later
	vfLook   = 50 * time.Millisecond
	lockWait = 30 * time.Second
)

func newKeeper(cfg *Config) *keeper {
	dir := cfg.StateDir
	if dir == "" {
		dir = DefaultStateDir
	}
	k := &keeper{sys: kernelTree, dir: dir, write: writeKernel, links: kernelLinks{}, wait: vfWait, log: cfg.Logger}
	k.ready = k.carries
	return k
}

func writeKernel(file, text string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// take puts back what dead daemons left and makes what the settings ask for. What it made it puts back if it fails.
func (k *keeper) take(cfg *Config) (err error) {
	if len(cfg.VFs) == 0 {
		if entries, err := os.ReadDir(k.dir); err != nil || len(entries) == 0 {
			return nil // nobody ever made any
		}
	}
	unlock, err := k.lock()
	if err != nil {
		return err
	}
	defer unlock()
	wishes, err := k.resolve(cfg)
	if err != nil {
		return err
	}
	if err := k.reclaim(wishes); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.putBack())
		}
	}()
	for _, w := range wishes {
		if err := k.makeVFs(w); err != nil {
			return fmt.Errorf("make %d virtual functions of %s: %w", w.Count, w.PF, err)
		}
	}
	return k.setUp(cfg)
}

// lock keeps other daemons out. The daemon's grips are locked by files of their own.
func (k *keeper) lock() (unlock func(), err error) {
	if err := os.MkdirAll(k.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder for the state of virtual functions: %w: run the daemon as root", err)
	}
	f, err := os.OpenFile(filepath.Join(k.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock virtual functions: %w: run the daemon as root", err)
	}
	end := time.Now().Add(lockWait)
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if time.Now().After(end) {
			f.Close()
			return nil, fmt.Errorf("lock virtual functions: another daemon is at it for %v: %w", lockWait, err)
		}
		time.Sleep(vfLook)
	}
}

// resolve names the physical functions of the settings by their PCI addresses.
func (k *keeper) resolve(cfg *Config) (wishes []VFs, err error) {
	add := func(pci string, n int) {
		if !slices.ContainsFunc(wishes, func(w VFs) bool { return w.PF == pci }) {
			wishes = append(wishes, VFs{pci, n})
		}
	}
	// Those that are named first, so that a number for all does not override them.
	for _, v := range cfg.VFs {
		if v.PF == "" {
			continue
		}
		pci := k.sys.functionNamed(v.PF)
		if pci == "" {
			return nil, fmt.Errorf("make virtual functions of %s: there is no such network interface, RDMA device or PCI function on this host", v.PF)
		}
		add(pci, v.Count)
	}
	for _, v := range cfg.VFs {
		if v.PF != "" {
			continue
		}
		found := 0
		for _, pci := range k.sys.physicalFunctions(cfg.Devices) {
			found++
			add(pci, v.Count)
		}
		if found == 0 {
			return nil, errors.New("make virtual functions: none of the RDMA devices to be used can have any: switch SR-IOV on in the card (mlxconfig -d DEVICE set SRIOV_EN=1 NUM_OF_VFS=8) and in the machine's firmware, or name the function, as eth0=2")
		}
	}
	return wishes, nil
}

// reclaim looks at what is written down: what nobody holds any more is put back, or taken over where it is what is wanted.
func (k *keeper) reclaim(wishes []VFs) error {
	files, err := filepath.Glob(filepath.Join(k.dir, "*.json"))
	if err != nil {
		return err
	}
	for _, name := range files {
		g, err := k.openGrip(name)
		if err != nil || g == nil {
			if err != nil {
				return err
			}
			continue // somebody holds it, or it says nothing
		}
		wanted := slices.ContainsFunc(wishes, func(w VFs) bool { return w.PF == g.PF && w.Count == g.Count })
		if wanted && g.Mark != "" {
			k.log.Info("virtual functions of a daemon that died are taken over", "pf", g.PF, "count", g.Count, "pid", g.PID)
			g.PID = os.Getpid()
			k.held = append(k.held, g)
			if err := errors.Join(g.save(), unix.Flock(int(g.file.Fd()), unix.LOCK_SH|unix.LOCK_NB)); err != nil {
				return err
			}
			continue
		}
		k.log.Info("virtual functions of a daemon that died are put back", "pf", g.PF, "count", g.Count, "pid", g.PID)
		if err := k.remove(g); err != nil {
			return err
		}
	}
	return nil
}

// openGrip locks a record that nobody holds; nil where somebody does, or where its functions are not there any more.
func (k *keeper) openGrip(name string) (*grip, error) {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("read the state of virtual functions: %w", err)
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return nil, f.Close()
	}
	g := &grip{file: f}
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := json.Unmarshal(b, &g.record); err != nil || !pciAddress.MatchString(g.PF) || !k.ours(&g.record) {
		return nil, errors.Join(os.Remove(name), f.Close())
	}
	return g, nil
}

// ours says whether the functions that are there now are those written down.
func (k *keeper) ours(r *record) bool {
	return r.Boot == k.boot() && k.sys.functionsOf(r.PF).made == r.Count && (r.Mark == "" || r.Mark == k.mark(r.PF))
}

func (k *keeper) boot() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// mark names the functions that are there now: the kernel gives each new folder a new number.
func (k *keeper) mark(pf string) string {
	var words []string
	for _, vf := range k.sys.virtual(pf) {
		var st unix.Stat_t
		if unix.Stat(k.sys.path("bus/pci/devices", vf), &st) == nil {
			words = append(words, fmt.Sprintf("%s/%d", vf, st.Ino))
		}
	}
	return strings.Join(words, " ")
}

func (k *keeper) stateFile(pf string) string { return filepath.Join(k.dir, pf+".json") }

// makeVFs makes the functions of one wish, unless this daemon or its predecessor has them.
func (k *keeper) makeVFs(w VFs) error {
	if slices.ContainsFunc(k.held, func(g *grip) bool { return g.PF == w.PF }) {
		return nil
	}
	if shared, err := k.share(w); shared || err != nil {
		return err
	}
	if err := k.possible(w); err != nil {
		return err
	}
	g := &grip{record: record{PF: w.PF, Count: w.Count, Boot: k.boot(), PID: os.Getpid(), Made: time.Now().UTC()}}
	var err error
	if g.file, err = os.OpenFile(k.stateFile(w.PF), os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600); err != nil {
		return err
	}
	k.held = append(k.held, g)
	if err := errors.Join(unix.Flock(int(g.file.Fd()), unix.LOCK_SH|unix.LOCK_NB), g.save()); err != nil {
		return err
	}
	if err := k.write(k.sys.path("bus/pci/devices", w.PF, "sriov_numvfs"), strconv.Itoa(w.Count)); err != nil {
		return k.explain(err)
	}
	g.Mark = k.mark(w.PF)
	k.log.Info("virtual functions made", "pf", w.PF, "count", w.Count, "functions", strings.Join(k.sys.virtual(w.PF), ","))
	return g.save()
}

// share holds what another living daemon made, which this one is the successor or the neighbour of.
func (k *keeper) share(w VFs) (bool, error) {
	f, err := os.OpenFile(k.stateFile(w.PF), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	g := &grip{file: f}
	b, err := os.ReadFile(f.Name())
	if err == nil {
		err = json.Unmarshal(b, &g.record)
	}
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	}
	if err == nil && g.Count != w.Count {
		err = fmt.Errorf("a daemon (process %d) holds %d: ask for as many, or stop it first", g.PID, g.Count)
	}
	if err != nil {
		return false, errors.Join(err, f.Close())
	}
	k.held = append(k.held, g)
	return true, nil
}

// possible says what stands in the way of making functions.
func (k *keeper) possible(w VFs) error {
	f := k.sys.functionsOf(w.PF)
	switch {
	case f.pf != "":
		return fmt.Errorf("it is itself a virtual function of %s: name that one", f.pf)
	case f.max == 0:
		return errors.New("it has no SR-IOV: switch it on in the card (mlxconfig -d DEVICE set SRIOV_EN=1 NUM_OF_VFS=8, then a cold start) and in the machine's firmware, or use another card")
	case w.Count > f.max:
		return fmt.Errorf("it can have %d (sriov_totalvfs)", f.max)
	case f.made > 0:
		return fmt.Errorf("it has %d that somebody else made: use them by name with --rdma-devices, or free them first: echo 0 > /sys/bus/pci/devices/%s/sriov_numvfs", f.made, w.PF)
	}
	for _, name := range k.sys.netdevsOf(w.PF) {
		if up, err := k.links.isUp(name); err == nil && !up {
			return fmt.Errorf("its link is down, and so theirs would be: ip link set %s up", name)
		}
	}
	return nil
}

// explain says what to do about what the kernel answered.
func (k *keeper) explain(err error) error {
	firmware := "switch SR-IOV and the IOMMU (VT-d, AMD-Vi) on in the machine's firmware, and boot with pci=realloc"
	if entries, _ := os.ReadDir(k.sys.path("class/iommu")); len(entries) == 0 {
		firmware += "; the IOMMU is off now (intel_iommu=on or amd_iommu=on)"
	}
	switch {
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: /sys is read-only here, as in a container: run the daemon on the host or privileged, or make them outside and name them with --rdma-devices", err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: run the daemon as root, or make them before and name them with --rdma-devices", err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: somebody makes or frees functions of it at this moment, or a machine uses one: try again", err)
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EIO), errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%w: the machine has no room for them: %s", err, firmware)
	}
	return fmt.Errorf("%w: the kernel's log says why (dmesg)", err)
}

func (g *grip) save() error {
	b, err := json.Marshal(&g.record)
	if err != nil {
		return err
	}
	if err := g.file.Truncate(0); err != nil {
		return err
	}
	if _, err := g.file.WriteAt(append(b, '\n'), 0); err != nil {
		return err
	}
	return g.file.Sync()
}

// release puts back what this daemon holds.
func (k *keeper) release() error {
	if len(k.held) == 0 {
		return nil
	}
	unlock, err := k.lock()
	if err != nil {
		return err
	}
	defer unlock()
	return k.putBack()
}

func (k *keeper) putBack() error {
	var errs []error
	for _, g := range k.held {
		// Where another daemon holds them too, they are its to put back.
		if unix.Flock(int(g.file.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			errs = append(errs, g.file.Close())
			continue
		}
		errs = append(errs, k.remove(g))
	}
	k.held = nil
	return errors.Join(errs...)
}

// remove puts functions back if they are still those that were made, and forgets them. If that fails they stay written down.
func (k *keeper) remove(g *grip) error {
	if k.ours(&g.record) && g.Count > 0 {
		if err := k.write(k.sys.path("bus/pci/devices", g.PF, "sriov_numvfs"), "0"); err != nil {
			return errors.Join(fmt.Errorf("put the virtual functions of %s back: %w", g.PF, k.explain(err)), g.file.Close())
		}
		k.log.Info("virtual functions put back", "pf", g.PF, "count", g.Count)
	}
	return errors.Join(os.Remove(k.stateFile(g.PF)), g.file.Close())
}

// functions lists the virtual functions that are held.
func (k *keeper) functions() (list []string) {
	for _, g := range k.held {
		list = append(list, k.sys.virtual(g.PF)...)
	}
	return list
}
