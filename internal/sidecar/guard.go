package sidecar

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sweepTimeout bounds how long killed processes may take to be gone: one that hangs in a driver may never be.
const sweepTimeout = 30 * time.Second

// sweepAgain is the pause between looks for what was forked while others were killed.
const sweepAgain = 10 * time.Millisecond

// guard is the process between a sidecar and its engine. An engine is a tree of processes, not all of which notice that
// their parent is gone; the guard does, adopts whom the tree orphans, and leaves nobody behind.
type guard struct {
	root int

	mu     sync.Mutex // guards reaped; held while a process is waited for or signalled, so that its number is still its own
	reaped bool
	status syscall.WaitStatus

	rootEnded chan struct{}
	allEnded  chan struct{}
}

// Guard runs argv and returns its exit status once all its descendants are gone. They are killed when it ends, and when
// the other end of the pipe at descriptor lifeline closes, which it does when the sidecar is gone in whatever way. SIGTERM
// is handed on to argv's process alone, which knows how to end its children. It must be the process's only business.
func Guard(lifeline int, argv []string) (int, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("adopt orphans: %w", err)
	}
	// Caught and not ignored: what is ignored stays ignored in the engine.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE)
	syscall.CloseOnExec(lifeline)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = io.Copy(io.Discard, os.NewFile(uintptr(lifeline), "lifeline"))
	}()
	g := &guard{rootEnded: make(chan struct{}), allEnded: make(chan struct{})}
	// The kernel sends the parent-death signal when the thread that forked ends.
	runtime.LockOSThread()
	if err := g.start(argv); err != nil {
		return 0, err
	}
	go g.reap()
	for {
		select {
		case s := <-signals:
			if s == syscall.SIGTERM {
				g.signalRoot(syscall.SIGTERM)
			}
		case <-gone:
			return 128 + int(syscall.SIGKILL), g.sweep()
		case <-g.rootEnded:
			return exitStatus(g.status), g.sweep()
		}
	}
}

func (g *guard) start(argv []string) error {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return fmt.Errorf("start engine: %w", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return fmt.Errorf("start engine: %w", err)
	}
	defer null.Close()
	g.root, err = syscall.ForkExec(path, argv, &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{null.Fd(), 1, 2},
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", path, err)
	}
	return nil
}

// reap waits for every child, own or adopted, until there are none.
func (g *guard) reap() {
	defer close(g.allEnded)
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return // ECHILD
		}
		g.mu.Lock()
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == nil && pid == g.root {
			g.reaped, g.status = true, status
			close(g.rootEnded)
		}
		g.mu.Unlock()
	}
}

func (g *guard) signalRoot(sig syscall.Signal) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.reaped {
		_ = syscall.Kill(g.root, sig)
	}
}

// sweep kills what is left and waits until it is gone.
func (g *guard) sweep() error {
	deadline := time.NewTimer(sweepTimeout)
	defer deadline.Stop()
	for {
		g.mu.Lock()
		left := descendants(os.Getpid())
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		g.mu.Unlock()
		select {
		case <-g.allEnded:
			return nil
		case <-deadline.C:
			return fmt.Errorf("processes %v do not end on SIGKILL: they hang in the kernel (a driver?)", left)
		case <-time.After(sweepAgain):
		}
	}
}

// exitStatus is what a shell makes of a process's end.
func exitStatus(s syscall.WaitStatus) int {
	if s.Signaled() {
		return 128 + int(s.Signal())
	}
	return s.ExitStatus()
}
