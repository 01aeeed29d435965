package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// markName is the variable that marks every process of a cluster: children inherit it whatever becomes of their parent.
const markName = "E2E_MARK"

// marked lists the living processes that carry a mark.
func marked(mark string) []int {
	var pids []int
	entries, _ := os.ReadDir("/proc")
	want := []byte(markName + "=" + mark + "\x00")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err == nil && bytes.Contains(append([]byte{0}, env...), append([]byte{0}, want...)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// alive tells whether a process exists and is no zombie.
func alive(pid int) bool {
	state := procState(pid)
	if state == 'Z' { // its first thread is; another may still hold the files, and take a connection before it ends
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		return err == nil && len(tasks) > 1
	}
	return state != 0 && state != 'X'
}

// procState is the letter of /proc/PID/stat, 0 when there is no such process.
func procState(pid int) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	i := bytes.LastIndexByte(stat, ')')
	if i < 0 || i+2 >= len(stat) {
		return 0
	}
	return stat[i+2]
}

func commandLine(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " "))
}

// openFiles counts a process's descriptors.
func openFiles(pid int) int {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(entries)
}

// describe names processes for an error message.
func describe(pids []int) string {
	var out []string
	for _, pid := range pids {
		out = append(out, fmt.Sprintf("%d (%c) %s", pid, procState(pid), commandLine(pid)))
	}
	return strings.Join(out, "; ")
}

// signal sends a signal to one process; one that has gone already is an error.
func signal(pid int, sig syscall.Signal) error {
	if err := syscall.Kill(pid, sig); err != nil {
		return fmt.Errorf("send %s to %d: %w", sig, pid, err)
	}
	return nil
}

// stopped waits until a stopped process is really stopped.
func stopped(pid int) error {
	return poll(2*time.Second, func() error {
		if s := procState(pid); s != 'T' {
			return fmt.Errorf("process %d is in state %c", pid, s)
		}
		return nil
	})
}

// noLeftovers says what a cluster left behind: processes, listening ports, sockets, files outside of what it may keep.
func noLeftovers(mark, dir string, addrs []string) error {
	var errs []error
	if pids := marked(mark); len(pids) > 0 {
		errs = append(errs, fmt.Errorf("processes: %s", describe(pids)))
	}
	for _, a := range addrs {
		if c, err := net.DialTimeout("tcp", a, time.Second); err == nil {
			_ = c.Close()
			errs = append(errs, fmt.Errorf("somebody still listens on %s", a))
		}
	}
	return errors.Join(append(errs, leftFiles(dir))...)
}

// leftFiles looks through a cluster's folder: no socket may be left, nor anything in its TMPDIR and runtime folder.
func leftFiles(dir string) error {
	var errs []error
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && e.Name() == "etcd" {
			return fs.SkipDir // its data is kept for the next start
		}
		if e.Type()&fs.ModeSocket != 0 {
			errs = append(errs, fmt.Errorf("socket %s", path))
		}
		switch name := e.Name(); {
		case name == "ready.json", name == "state.json", name == "lock", strings.HasSuffix(name, ".pid"), strings.HasSuffix(name, ".tmp"):
			errs = append(errs, fmt.Errorf("file %s", path))
		}
		return nil
	})
	errs = append(errs, err)
	for _, sub := range []string{"tmp", "run"} {
		entries, _ := os.ReadDir(filepath.Join(dir, sub))
		for _, e := range entries {
			errs = append(errs, fmt.Errorf("file %s", filepath.Join(dir, sub, e.Name())))
		}
	}
	return errors.Join(errs...)
}
