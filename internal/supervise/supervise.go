// Package supervise runs the parts of Headrace as child processes on one machine: it starts them, restarts one that
// dies, stops all in order, and takes them along when it is itself killed. It must not know what a part does beyond
// its command line, its entry in the registry and its /health.
package supervise

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

const (
	// healthyAfter is how long a life must have lasted for the next restart to be at once.
	healthyAfter = time.Second
	// Restarts of a child that keeps dying are delayed from backoffMin on, doubling up to backoffMax.
	backoffMin = 100 * time.Millisecond
	backoffMax = 5 * time.Second
)

// Spec is a child to keep running.
type Spec struct {
	Name  string
	Args  []string      // after the executable
	Files []*os.File    // inherited from descriptor 4 on; 3 is the pipe that WatchParent reads
	Grace time.Duration // between SIGTERM and SIGKILL
}

// ParentFD is the descriptor that a child finds the supervisor's pipe at.
const ParentFD = 3

// Exit tells of a child's end that was not asked for.
type Exit struct {
	Name      string
	PID       int
	Err       error  // as exec.Cmd.Wait gives it
	LastLine  string // of its log
	Signalled bool   // it was killed; otherwise it ended by itself
	Restart   time.Duration
}

// Reason says in a line why the child ended.
func (e Exit) Reason() string {
	if e.Signalled || e.LastLine == "" {
		return fmt.Sprint(e.Err)
	}
	return e.LastLine
}

// Group runs children.
type Group struct {
	exe    string
	logDir string
	stream io.Writer // nil for none
	log    *slog.Logger
	onExit func(Exit) bool
	spawn  *spawner
	life   *lifeline

	mu       sync.Mutex // guards what follows
	children map[string]*child
	pids     map[string]int // of those that run now
}

type child struct {
	g    *Group
	spec Spec
	sink *logSink
	stop chan struct{} // closed to end it
	once sync.Once
	done chan struct{} // closed when it will run no more

	mu  sync.Mutex // guards cmd
	cmd *exec.Cmd  // nil between lives
}

// GroupConfig says how children are run.
type GroupConfig struct {
	Exe    string
	LogDir string   // one file a child; "" for none
	Stream *os.File // also prefixed to here; nil for not
	Logger *slog.Logger
	// OnExit is told of each end that was not asked for; false means that the child is not to run again.
	// It is called from the child's goroutine and must not block. nil restarts always.
	OnExit func(Exit) bool
}

// NewGroup makes an empty group.
func NewGroup(cfg GroupConfig) (*Group, error) {
	life, err := newLifeline()
	if err != nil {
		return nil, err
	}
	g := &Group{
		exe: cfg.Exe, logDir: cfg.LogDir, log: cfg.Logger, onExit: cfg.OnExit, spawn: newSpawner(), life: life,
		children: map[string]*child{}, pids: map[string]int{},
	}
	if cfg.Stream != nil {
		g.stream = &lockedWriter{w: cfg.Stream}
	}
	return g, nil
}

// Start runs a child and keeps it running until Stop.
func (g *Group) Start(spec Spec) error {
	c := &child{g: g, spec: spec, stop: make(chan struct{}), done: make(chan struct{})}
	var err error
	if c.sink, err = openLog(g.logDir, spec.Name, g.stream); err != nil {
		return err
	}
	drained, err := c.launch()
	if err != nil {
		c.sink.close()
		return fmt.Errorf("start %s: %w", spec.Name, err)
	}
	g.mu.Lock()
	g.children[spec.Name] = c
	g.mu.Unlock()
	go c.keep(drained)
	return nil
}

// PIDs returns the processes that run now, by name.
func (g *Group) PIDs() map[string]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.pids)
}

// Stop ends the named children together: SIGTERM, and SIGKILL after each one's grace or when hard closes.
func (g *Group) Stop(hard <-chan struct{}, names ...string) {
	var wg sync.WaitGroup
	for _, name := range names {
		g.mu.Lock()
		c := g.children[name]
		delete(g.children, name)
		g.mu.Unlock()
		if c != nil {
			wg.Go(func() { c.end(hard) })
		}
	}
	wg.Wait()
}

// Close ends what still runs, at once, and releases the group.
func (g *Group) Close() {
	hard := make(chan struct{})
	close(hard)
	g.mu.Lock()
	names := make([]string, 0, len(g.children))
	for name := range g.children {
		names = append(names, name)
	}
	g.mu.Unlock()
	g.Stop(hard, names...)
	g.spawn.close()
	g.life.close()
}

// launch starts one life; drained closes when its output has been read to the end.
func (c *child) launch() (drained chan struct{}, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make output pipe: %w", err)
	}
	cmd := exec.Command(c.g.exe, c.spec.Args...)
	cmd.Stdout, cmd.Stderr = w, w
	cmd.ExtraFiles = append([]*os.File{c.g.life.read}, c.spec.Files...)
	err = c.g.spawn.start(cmd)
	_ = w.Close()
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	drained = make(chan struct{})
	go func() {
		defer close(drained)
		defer r.Close()
		c.sink.drain(r)
	}()
	c.setCmd(cmd)
	return drained, nil
}

func (c *child) setCmd(cmd *exec.Cmd) {
	c.mu.Lock()
	c.cmd = cmd
	c.mu.Unlock()
	c.g.mu.Lock()
	defer c.g.mu.Unlock()
	if cmd == nil {
		delete(c.g.pids, c.spec.Name)
	} else {
		c.g.pids[c.spec.Name] = cmd.Process.Pid
	}
}

// keep waits for each life's end and starts the next.
func (c *child) keep(drained chan struct{}) {
	defer close(c.done)
	defer c.sink.close()
	delay := time.Duration(0)
	for {
		started := time.Now()
		err := c.cmd.Wait()
		pid := c.cmd.Process.Pid
		c.setCmd(nil)
		waitAtMost(drained, time.Second)
		if c.stopping() {
			return
		}
		if time.Since(started) >= healthyAfter {
			delay = 0
		}
		if !c.report(pid, err, delay) || !c.pause(delay) {
			return
		}
		delay = min(max(2*delay, backoffMin), backoffMax)
		for {
			if drained, err = c.launch(); err == nil {
				break
			}
			c.g.log.Error("restart "+c.spec.Name, "err", err)
			if !c.pause(backoffMax) {
				return
			}
		}
		c.g.log.Info("restarted "+c.spec.Name, "pid", c.cmd.Process.Pid)
		if c.stopping() { // end may have looked for a process just before there was one
			c.signal(syscall.SIGKILL)
		}
	}
}

// report tells of a life's end, and whether there is to be another.
func (c *child) report(pid int, err error, delay time.Duration) bool {
	if err == nil {
		err = errors.New("it ended by itself")
	}
	var exit *exec.ExitError
	signalled := false
	if errors.As(err, &exit) {
		status, ok := exit.Sys().(syscall.WaitStatus)
		signalled = ok && status.Signaled()
	}
	e := Exit{Name: c.spec.Name, PID: pid, Err: err, LastLine: c.sink.lastLine(), Signalled: signalled, Restart: delay}
	if c.g.onExit != nil && !c.g.onExit(e) {
		return false
	}
	c.g.log.Warn(c.spec.Name+" ended, restarting", "pid", pid, "why", e.Reason(), "in", delay)
	return true
}

func (c *child) stopping() bool {
	select {
	case <-c.stop:
		return true
	default:
		return false
	}
}

// pause waits; false means that the child is to end.
func (c *child) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-c.stop:
		return false
	case <-timer.C:
		return true
	}
}

func (c *child) end(hard <-chan struct{}) {
	c.once.Do(func() { close(c.stop) })
	c.signal(syscall.SIGTERM)
	c.signal(syscall.SIGCONT) // a stopped process would not see it
	timer := time.NewTimer(c.spec.Grace)
	defer timer.Stop()
	select {
	case <-c.done:
		return
	case <-timer.C:
		c.g.log.Warn(c.spec.Name+" does not stop, killing it", "after", c.spec.Grace)
	case <-hard:
	}
	c.signal(syscall.SIGKILL)
	<-c.done
}

// signal goes to the child's whole process group, and to nobody when the child is gone.
func (c *child) signal(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// While cmd is set Wait has not returned to us, but it may have reaped: ask through the handle, which knows.
	if c.cmd != nil && c.cmd.Process.Signal(syscall.Signal(0)) == nil {
		_ = syscall.Kill(-c.cmd.Process.Pid, sig)
	}
}

func waitAtMost(done <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}
