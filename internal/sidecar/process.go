package sidecar

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// GuardFD is where a guard finds its lifeline.
const GuardFD = 3

// markVariable is in the environment of every process of an engine, with a value of this run's own.
const markVariable = "HEADRACE_ENGINE_MARK"

// guardGrace is how long the guard may take, beyond its own sweep, to end once its lifeline is cut.
const guardGrace = 5 * time.Second

// process is an engine that this sidecar started.
type process struct {
	cmd      *exec.Cmd
	mark     string
	lifeline *os.File // closing it kills the engine
	out      *tail
	ended    chan struct{} // closed when everything of it is gone, with err
	err      error
}

// startProcess starts a command under a guard. guardArgv is the command line of a program that calls Guard with what follows.
func startProcess(guardArgv []string, c *Command, out io.Writer) (*process, error) {
	// Should the guard itself be killed, its engine's orphans come here.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("adopt orphans: %w", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make the guard's pipe: %w", err)
	}
	defer r.Close()
	logR, logW, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the engine's output pipe: %w", err), w.Close())
	}
	defer logW.Close()
	p := &process{mark: markVariable + "=" + rand.Text(), lifeline: w, out: &tail{out: out}, ended: make(chan struct{})}
	p.cmd = exec.Command(guardArgv[0], append(append([]string{}, guardArgv[1:]...), c.Words...)...)
	p.cmd.Env = append(append(os.Environ(), c.Env...), p.mark)
	p.cmd.Stdout, p.cmd.Stderr = logW, logW
	p.cmd.ExtraFiles = []*os.File{r}
	// A session of its own: neither the terminal's Ctrl-C nor a signal to our process group is the engine's.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start the engine's guard: %w", err), w.Close(), logR.Close())
	}
	go p.wait(logR)
	return p, nil
}

func (p *process) wait(log *os.File) {
	defer close(p.ended)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		defer log.Close()
		p.out.drain(log)
	}()
	err := p.cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && !exit.Exited() {
		p.err = errors.Join(fmt.Errorf("its guard was killed (%w)", err), p.sweep())
	} else {
		p.err = describeExit(p.cmd.ProcessState.ExitCode())
	}
	select {
	case <-drained: // nobody is left who could write
	case <-time.After(time.Second): // somebody was handed the pipe who is none of ours
	}
	_ = p.lifeline.Close()
}

// describeExit says how an engine ended, from its guard's exit status.
func describeExit(code int) error {
	switch {
	case code == 0:
		return errors.New("it ended by itself, with exit status 0")
	case code > 128 && unix.SignalName(syscall.Signal(code-128)) != "":
		return fmt.Errorf("it was ended by %s", unix.SignalName(syscall.Signal(code-128)))
	}
	return errors.New("it ended with exit status " + strconv.Itoa(code))
}

// sweep kills the orphans of a guard that was killed. They are this process's children by now.
func (p *process) sweep() error {
	var left []int
	ours := map[int]bool{}
	for deadline := time.Now().Add(sweepTimeout); time.Now().Before(deadline); time.Sleep(sweepAgain) {
		left = left[:0]
		for _, pid := range descendants(os.Getpid()) {
			_, session := lineage(pid)
			if carries(pid, p.mark) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
				left, ours[pid] = append(left, pid), true
			} else if session == p.cmd.Process.Pid { // it has ended, and its environment with it
				ours[pid] = true
			}
		}
		for pid := range ours {
			_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		}
		if len(left) == 0 {
			return nil
		}
	}
	return fmt.Errorf("processes %v of the engine do not end on SIGKILL", left)
}

// stop ends the engine: SIGTERM, and SIGKILL for whoever is left of it after grace or when hurry ends.
func (p *process) stop(grace time.Duration, hurry <-chan struct{}) error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-p.ended:
		return nil
	case <-hurry:
	case <-timer.C:
	}
	_ = p.lifeline.Close()
	select {
	case <-p.ended:
		return nil
	case <-time.After(sweepTimeout + guardGrace):
		return errors.New("the engine does not end on SIGKILL: it hangs in the kernel (a driver?)")
	}
}
