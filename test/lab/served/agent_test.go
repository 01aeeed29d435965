package served

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
)

// agent starts and ends the parts in one machine, as the test in the first one orders by net/rpc.
type agent struct {
	dir string

	mu    sync.Mutex
	parts map[string]*part
}

type part struct {
	cmd   *exec.Cmd
	ended chan struct{}
	log   string
}

// Run is a command with its files: what `headrace` is called with.
type Run struct {
	Name string // of the part; its log is called so
	Args []string
}

// Once runs headrace to its end and gives what it wrote.
func (a *agent) Once(args []string, out *string) error {
	b, err := exec.Command(os.Getenv("HEADRACE_BIN"), args...).CombinedOutput()
	if *out = string(b); err != nil {
		return fmt.Errorf("headrace %v: %w\n%s", args, err, b)
	}
	return nil
}

// Files writes files, for their owner alone.
func (a *agent) Files(files map[string][]byte, _ *bool) error {
	for name, data := range files {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// Start starts a part, which takes the place of one of that name that has ended, and gives its process id.
func (a *agent) Start(r Run, pid *int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := &part{cmd: exec.Command(os.Getenv("HEADRACE_BIN"), r.Args...), ended: make(chan struct{}), log: filepath.Join(a.dir, r.Name+".log")}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	go func() {
		_ = p.cmd.Wait() // what it ended with is in its log
		close(p.ended)
	}()
	a.parts[r.Name] = p
	*pid = p.cmd.Process.Pid
	return nil
}

// Kill ends a part as nothing but the kernel can, and waits until it is gone.
func (a *agent) Kill(name string, _ *bool) error {
	a.mu.Lock()
	p := a.parts[name]
	a.mu.Unlock()
	if p == nil {
		return fmt.Errorf("no part is called %q", name)
	}
	err := p.cmd.Process.Kill()
	<-p.ended
	if errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("%s had ended by itself", name)
	}
	return err
}

// Alive gives the process ids of the parts that run.
func (a *agent) Alive(_ int, pids *map[string]int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	*pids = make(map[string]int)
	for name, p := range a.parts {
		select {
		case <-p.ended:
		default:
			(*pids)[name] = p.cmd.Process.Pid
		}
	}
	return nil
}

// Logs gives the end of each part's log.
func (a *agent) Logs(_ int, out *string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for name, p := range a.parts {
		b, _ := os.ReadFile(p.log) // a log that is gone says nothing
		*out += fmt.Sprintf("--- %s\n%s\n", name, b[max(0, len(b)-3000):])
	}
	return nil
}

// end kills whatever still runs.
func (a *agent) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.parts {
		_ = p.cmd.Process.Kill() // it may have ended
		<-p.ended
	}
}
