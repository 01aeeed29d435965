package supervise

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
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

// Signals returns a context that ends at the first SIGINT, SIGTERM or SIGHUP, and a channel closed at the second.
func Signals(ctx context.Context) (first context.Context, second <-chan struct{}, stop func()) {
	c := make(chan os.Signal, 2)
	signal.Notify(c, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
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
