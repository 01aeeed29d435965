// Command guest is the first process of a lab machine: it loads modules, sets up the network, runs the script's commands
// with their output on the second serial line, says how they ended and turns the machine off.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/test/lab/script"
)

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "guest: this is the init of a lab machine; run `make lab`")
		os.Exit(2)
	}
	status := 1
	err := mountAll()
	out, openErr := os.OpenFile("/dev/ttyS1", os.O_WRONLY|syscall.O_NOCTTY, 0)
	if openErr != nil {
		out = os.Stdout
	}
	if err == nil {
		status, err = run(out)
	}
	if err != nil {
		fmt.Fprintln(out, "guest:", err)
	}
	fmt.Fprintf(out, "\n%s%d\n", script.ExitMark, status)
	_ = unix.IoctlSetInt(int(out.Fd()), unix.TCSBRK, 1) // returns when the line is through with it
	unix.Sync()
	panic(unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)) // it does not return
}

func mountAll() error {
	var errs []error
	for _, m := range []struct{ fs, dir string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}, {"tmpfs", "/run"}, {"bpf", "/sys/fs/bpf"}, {"cgroup2", "/sys/fs/cgroup"}, {"tracefs", "/sys/kernel/tracing"},
	} {
		if err := os.MkdirAll(m.dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) && m.fs != "bpf" {
			continue
		}
		err := unix.Mount(m.fs, m.dir, m.fs, 0, "")
		if err != nil && (m.fs == "proc" || m.fs == "sysfs" || m.fs == "devtmpfs") {
			errs = append(errs, fmt.Errorf("mount %s: %w", m.fs, err))
		}
	}
	limit := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	errs = append(errs, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &limit))
	files := unix.Rlimit{Cur: 1 << 16, Max: 1 << 16}
	errs = append(errs, unix.Setrlimit(unix.RLIMIT_NOFILE, &files))
	return errors.Join(errs...)
}

// vm says which machine this is, from 1.
func vm() (int, error) {
	b, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return 0, err
	}
	for _, word := range strings.Fields(string(b)) {
		if n, ok := strings.CutPrefix(word, "lab.vm="); ok {
			return strconv.Atoi(n)
		}
	}
	return 1, nil
}

func run(out io.Writer) (status int, err error) {
	b, err := os.ReadFile(script.Path)
	if err != nil {
		return 1, err
	}
	var s script.Script
	if err := json.Unmarshal(b, &s); err != nil {
		return 1, err
	}
	// The kernel's own choice (fq_codel) drops what has waited for some milliseconds, as all does where processors are few:
	// soft RoCE takes that badly, and wires are to lose what tests tell them to.
	if err := os.WriteFile("/proc/sys/net/core/default_qdisc", []byte("pfifo_fast"), 0); err != nil {
		return 1, fmt.Errorf("choose a queue for interfaces: %w", err)
	}
	for _, m := range s.Modules {
		if err := load(m); err != nil {
			return 1, fmt.Errorf("load %s: %w", filepath.Base(m), err)
		}
	}
	n, err := vm()
	if err != nil || n < 1 || n > len(s.Machines) {
		return 1, fmt.Errorf("machine %d of %d: %w", n, len(s.Machines), err)
	}
	// Orphans are this process's to reap; exec.Cmd waits for its own.
	signal.Ignore(syscall.SIGPIPE)
	os.Setenv("PATH", "/bin")
	os.Setenv("HOME", "/tmp")
	os.Setenv("LAB_VM", strconv.Itoa(n))
	for _, args := range s.Machines[n-1].Setup {
		cmd := exec.Command(args[0], args[1:]...)
		if text, err := cmd.CombinedOutput(); err != nil {
			return 1, fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, text)
		}
	}
	for _, c := range s.Machines[n-1].Commands {
		cmd := exec.Command(c.Args[0], c.Args[1:]...)
		cmd.Env = append(os.Environ(), c.Env...)
		cmd.Dir, cmd.Stdout, cmd.Stderr = c.Dir, out, out
		err := cmd.Run()
		var exit *exec.ExitError
		switch {
		case errors.As(err, &exit):
			fmt.Fprintf(out, "guest: %s: %v\n", strings.Join(c.Args, " "), err)
			if status == 0 {
				status = max(exit.ExitCode(), 1)
			}
		case err != nil:
			return 1, err
		}
	}
	return status, nil
}

func load(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}
