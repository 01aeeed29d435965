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

	mu    sync.Mutex         // guards what follows
	now   *life              // nil between lives
	lives map[*life]struct{} // now, one that is to replace it, and those that were replaced and have not ended
	news  chan struct{}      // capacity 1: now was replaced
	// changing is open while a replacement is under way, else nil: the end of now may then be what is wanted.
	changing chan struct{}
}

// life is one process of a child.
type life struct {
	cmd     *exec.Cmd
	began   time.Time
	drained chan struct{} // closed when its output has been read to the end
	ended   chan struct{} // closed when it has ended, with err
	err     error
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
	c := &child{g: g, spec: spec, stop: make(chan struct{}), done: make(chan struct{}), lives: map[*life]struct{}{}, news: make(chan struct{}, 1)}
	var err error
	if c.sink, err = openLog(g.logDir, spec.Name, g.stream); err != nil {
		return err
	}
	l, err := c.launch(spec.Args)
	if err != nil {
		c.sink.close()
		return fmt.Errorf("start %s: %w", spec.Name, err)
	}
	g.mu.Lock()
	g.children[spec.Name] = c
	g.mu.Unlock()
	c.setNow(l)
	go c.keep(l)
	return nil
}

// PIDs returns the processes that run now, by name.
func (g *Group) PIDs() map[string]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.pids)
}

// LastLine is the last line of a child's log.
func (g *Group) LastLine(name string) string {
	g.mu.Lock()
	c := g.children[name]
	g.mu.Unlock()
	if c == nil {
		return ""
	}
	return c.sink.lastLine()
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

// launch starts one life.
func (c *child) launch(args []string) (*life, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make output pipe: %w", err)
	}
	cmd := exec.Command(c.g.exe, args...)
	cmd.Stdout, cmd.Stderr = w, w
	cmd.ExtraFiles = append([]*os.File{c.g.life.read}, c.spec.Files...)
	err = c.g.spawn.start(cmd)
	_ = w.Close()
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	l := &life{cmd: cmd, began: time.Now(), drained: make(chan struct{}), ended: make(chan struct{})}
	go func() {
		defer close(l.drained)
		defer r.Close()
		c.sink.drain(r)
	}()
	c.mu.Lock()
	c.lives[l] = struct{}{}
	c.mu.Unlock()
	go func() {
		l.err = cmd.Wait()
		c.mu.Lock()
		delete(c.lives, l)
		c.mu.Unlock()
		close(l.ended)
	}()
	return l, nil
}

// setNow makes a life, or none, the child's present one.
func (c *child) setNow(l *life) {
	c.mu.Lock()
	c.now = l
	c.mu.Unlock()
	c.g.mu.Lock()
	defer c.g.mu.Unlock()
	if l == nil {
		delete(c.g.pids, c.spec.Name)
	} else {
		c.g.pids[c.spec.Name] = l.cmd.Process.Pid
	}
}

// keep waits for each life's end and starts the next. A life that was replaced is not its business any more.
func (c *child) keep(l *life) {
	defer close(c.done)
	defer c.sink.close()
	delay := time.Duration(0)
	for {
		select {
		case <-l.ended:
		case <-c.news:
		}
		c.mu.Lock()
		now, changing := c.now, c.changing
		c.mu.Unlock()
		if now != l {
			l, delay = now, 0
			continue
		}
		if changing != nil {
			<-changing
			continue
		}
		c.setNow(nil)
		waitAtMost(l.drained, time.Second)
		if c.stopping() {
			c.awaitAll()
			return
		}
		if time.Since(l.began) >= healthyAfter {
			delay = 0
		}
		if !c.report(l.cmd.Process.Pid, l.err, delay) || !c.pause(delay) {
			c.awaitAll()
			return
		}
		delay = min(max(2*delay, backoffMin), backoffMax)
		if l = c.relaunch(); l == nil {
			c.awaitAll()
			return
		}
	}
}

// relaunch starts the next life, as often as it takes; nil when the child is to end.
func (c *child) relaunch() *life {
	for {
		l, err := c.launch(c.spec.Args)
		if err == nil {
			c.setNow(l)
			c.g.log.Info("restarted "+c.spec.Name, "pid", l.cmd.Process.Pid)
			if c.stopping() { // end may have looked for a process just before there was one
				c.signal(syscall.SIGKILL)
			}
			return l
		}
		c.g.log.Error("restart "+c.spec.Name, "err", err)
		if !c.pause(backoffMax) {
			return nil
		}
	}
}

// awaitAll waits for every process of the child: end has signalled them.
func (c *child) awaitAll() {
	for {
		c.mu.Lock()
		var left *life
		for l := range c.lives {
			left = l
		}
		c.mu.Unlock()
		if left == nil {
			return
		}
		if !c.stopping() { // it is not to run again, and nothing of it is to stay
			_ = syscall.Kill(-left.cmd.Process.Pid, syscall.SIGKILL)
		}
		<-left.ended
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

// signal goes to the whole process group of each of the child's lives, and to nobody when it is gone.
func (c *child) signal(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for l := range c.lives {
		// While it is listed Wait has not returned to us, but it may have reaped: ask through the handle, which knows.
		if l.cmd.Process.Signal(syscall.Signal(0)) == nil {
			_ = syscall.Kill(-l.cmd.Process.Pid, sig)
		}
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
