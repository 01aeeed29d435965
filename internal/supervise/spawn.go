package supervise

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

// spawner starts processes from one OS thread that lives as long as it does: the kernel sends a child its parent-death
// signal when the thread that forked it ends, not when the process does, and Go's threads come and go.
type spawner struct {
	requests chan spawnRequest
	done     chan struct{}
}

type spawnRequest struct {
	cmd  *exec.Cmd
	errs chan error
}

func newSpawner() *spawner {
	s := &spawner{requests: make(chan spawnRequest), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for r := range s.requests {
			r.errs <- r.cmd.Start()
		}
	}()
	return s
}

// start runs cmd in a process group of its own, so that a Ctrl-C on the terminal reaches only the supervisor.
func (s *spawner) start(cmd *exec.Cmd) error {
	// SIGTERM and not SIGKILL, so that an orphan removes its socket; it kills itself soon after (WatchParent).
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	r := spawnRequest{cmd: cmd, errs: make(chan error, 1)}
	s.requests <- r
	return <-r.errs
}

// close ends the thread; no child may live any more.
func (s *spawner) close() {
	close(s.requests)
	<-s.done
}

// lifeline is a pipe whose write end this process alone holds: children see it close when this process is gone,
// however it went.
type lifeline struct{ read, write *os.File }

func newLifeline() (*lifeline, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make the pipe that children watch: %w", err)
	}
	return &lifeline{r, w}, nil
}

func (l *lifeline) close() {
	_ = l.read.Close()
	_ = l.write.Close()
}
