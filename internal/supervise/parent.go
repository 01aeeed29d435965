package supervise

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// orphanGrace is how long a child may tidy up after its supervisor is gone.
const orphanGrace = 1500 * time.Millisecond

// ErrOrphaned is why a child's context ended when its supervisor was gone.
var ErrOrphaned = errors.New("the supervisor is gone")

// WatchParent is a child's side of the pipe at descriptor fd: the context it returns ends when the supervisor does,
// and the process itself soon after, whatever it is doing. A descriptor below 3 means that there is no supervisor.
func WatchParent(ctx context.Context, fd int) context.Context {
	if fd < 3 {
		return ctx
	}
	// Log lines that nobody reads any more must not kill the process before it has tidied up.
	signal.Ignore(syscall.SIGPIPE)
	syscall.CloseOnExec(fd)
	pipe := os.NewFile(uintptr(fd), "supervisor")
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, pipe)
		cancel(ErrOrphaned)
		time.Sleep(orphanGrace)
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}()
	return ctx
}

// UpgradeSignal asks a node daemon, or a supervisor, to be replaced by the program that is at its path now. SIGHUP does the
// same where it does not mean that the terminal is gone.
const UpgradeSignal = syscall.SIGUSR2

// UpgradeRequests receives a value for each request to upgrade, from now on; some are lost when they come faster than
// they are taken.
func UpgradeRequests(terminal bool) (requests <-chan struct{}, stop func()) {
	c := make(chan os.Signal, 1)
	signals := []os.Signal{UpgradeSignal}
	if !terminal {
		signals = append(signals, syscall.SIGHUP)
	}
	signal.Notify(c, signals...)
	out, quit := make(chan struct{}), make(chan struct{})
	go func() {
		for {
			select {
			case <-c:
			case <-quit:
				return
			}
			select {
			case out <- struct{}{}:
			case <-quit:
				return
			}
		}
	}()
	return out, sync.OnceFunc(func() {
		signal.Stop(c)
		close(quit)
	})
}

// Signals returns a context that ends at the first SIGINT or SIGTERM, and a channel closed at the second. SIGHUP counts
// as one of them if hangup says so.
func Signals(ctx context.Context, hangup bool) (first context.Context, second <-chan struct{}, stop func()) {
	c := make(chan os.Signal, 2)
	signal.Notify(c, os.Interrupt, syscall.SIGTERM)
	if hangup {
		signal.Notify(c, syscall.SIGHUP)
	}
	first, cancel := context.WithCancel(ctx)
	again, quit := make(chan struct{}), make(chan struct{})
	go func() {
		select {
		case <-c:
			cancel()
		case <-quit:
			return
		}
		select {
		case <-c:
			close(again)
		case <-quit:
		}
	}()
	return first, again, func() {
		signal.Stop(c)
		close(quit)
		cancel()
	}
}
