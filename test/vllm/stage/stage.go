// Package stage sets up what the checks with a real vLLM act on: engines by command line, a whole `headrace up` with
// engines behind its router, requests, and what the engines' own metrics say. It judges nothing; its callers do.
package stage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/headrace/headrace/internal/stall"
)

// Env is where the parts are.
type Env struct {
	Root   string // the folder that scripts/vllm-env.sh names
	Binary string // headrace
}

// ErrNone says that there is no vLLM here.
var ErrNone = errors.New("HEADRACE_VLLM does not name an environment with vLLM (make vllm, or export HEADRACE_VLLM=$(scripts/vllm-env.sh))")

// Find reads HEADRACE_VLLM and HEADRACE_BIN.
func Find() (Env, error) {
	e := Env{Root: os.Getenv("HEADRACE_VLLM"), Binary: os.Getenv("HEADRACE_BIN")}
	if e.Root == "" {
		return e, ErrNone
	}
	for _, part := range []string{"venv/bin/python", "tiny/config.json", "windowed/config.json", "smollm2/config.json", "nixl/nixl", "connector/headrace"} {
		if _, err := os.Stat(filepath.Join(e.Root, part)); err != nil {
			return e, fmt.Errorf("use HEADRACE_VLLM=%s: %w; make it with scripts/vllm-env.sh", e.Root, err)
		}
	}
	if e.Binary == "" {
		return e, errors.New("HEADRACE_BIN does not name the headrace binary (make build)")
	}
	var err error
	e.Binary, err = filepath.Abs(e.Binary)
	return e, err
}

// Python is vLLM's interpreter.
func (e Env) Python() string { return filepath.Join(e.Root, "venv/bin/python") }

// Model is the folder of one of the models: tiny, windowed or smollm2.
func (e Env) Model(name string) string { return filepath.Join(e.Root, name) }

// variables are what every engine on this machine runs with: no network, one thread, no core of its own.
func (e Env) variables() []string {
	return []string{
		"VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_TARGET_DEVICE=cpu",
		"VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1",
		"SPT_NOENV=1", // Python's setproctitle, by which vLLM names its processes, leaves the variables where they are read
	}
}

// markName marks every process of a stage: children inherit it whatever becomes of their parents. Its value begins with who
// made the stage.
const markName = "HEADRACE_STAGE"

// self names this process beyond its life: its number, and when it began, for numbers come again.
var self = fmt.Sprintf("%d-%d", os.Getpid(), begun(os.Getpid()))

// Stage owns processes and a folder for what they write. Close ends them all.
type Stage struct {
	Env Env
	Dir string // short, for sockets lie below it

	mark   string
	mu     sync.Mutex
	procs  []*Process
	closed bool
}

// Process is one that the stage started.
type Process struct {
	Name string
	Log  string
	cmd  *exec.Cmd
	done chan struct{}
	err  error // after done
}

var stages struct {
	sync.Mutex
	made int
}

// New makes an empty stage. What the stages of processes have left that were killed is ended first.
func New(env Env) (*Stage, error) {
	for _, pid := range Orphans() {
		fmt.Fprintf(os.Stderr, "stage: ending what a test has left that was killed: %s\n", describe([]int{pid}))
		_ = syscall.Kill(pid, syscall.SIGKILL) // may have ended meanwhile
	}
	dir, err := os.MkdirTemp("", "hv")
	if err != nil {
		return nil, fmt.Errorf("make the stage's folder: %w", err)
	}
	stages.Lock()
	defer stages.Unlock()
	stages.made++
	return &Stage{Env: env, Dir: dir, mark: fmt.Sprintf("%s-%d", self, stages.made)}, nil
}

// start runs a program of the stage with more variables.
func (s *Stage) start(name string, env []string, argv ...string) (*Process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.New("start a process: the stage is closed")
	}
	p := &Process{Name: name, Log: filepath.Join(s.Dir, fmt.Sprintf("%s-%d.log", name, len(s.procs))), done: make(chan struct{})}
	log, err := os.Create(p.Log)
	if err != nil {
		return nil, fmt.Errorf("open the log of %s: %w", name, err)
	}
	defer log.Close()
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.Dir = log, log, s.Dir
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "HEADRACE_") && !strings.HasPrefix(e, "PYTHONPATH=") {
			p.cmd.Env = append(p.cmd.Env, e)
		}
	}
	p.cmd.Env = append(append(p.cmd.Env, s.Env.variables()...), markName+"="+s.mark)
	p.cmd.Env = append(p.cmd.Env, env...)
	// A process group of its own, and nothing outlives a test binary that is killed.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	s.procs = append(s.procs, p)
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// PID is the process's.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Stop ends the process in order and waits; after a while it kills it.
func (p *Process) Stop(sig syscall.Signal, limit time.Duration) error {
	_ = p.cmd.Process.Signal(sig)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.done:
		return nil
	case <-timer.C:
		_ = p.cmd.Process.Kill()
		<-p.done
		return fmt.Errorf("%s has not ended %s after %s", p.Name, limit, sig)
	}
}

// ended says how a process ended, nil while it runs.
func (p *Process) ended() error {
	select {
	case <-p.done:
		how := errors.New("exit status 0")
		if p.err != nil {
			how = p.err
		}
		return fmt.Errorf("%s has ended: %w; its log ends with:\n%s", p.Name, how, Tail(p.Log, 4000))
	default:
		return nil
	}
}

// Close ends all processes, in reverse order, and removes the folder. It names what would not end by itself.
func (s *Stage) Close() error {
	s.mu.Lock()
	s.closed = true
	procs := s.procs
	s.procs = nil
	s.mu.Unlock()
	var errs []error
	for i := len(procs) - 1; i >= 0; i-- {
		errs = append(errs, procs[i].Stop(syscall.SIGINT, 30*time.Second))
	}
	if err := Poll(context.Background(), 10*time.Second, func() error {
		if left := s.Marked(); len(left) > 0 {
			return fmt.Errorf("processes are left: %s", describe(left))
		}
		return nil
	}); err != nil {
		errs = append(errs, err)
		for _, pid := range s.Marked() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return errors.Join(append(errs, os.RemoveAll(s.Dir))...)
}

// Marked lists the stage's living processes.
func (s *Stage) Marked() []int {
	return marked(func(mark string) bool { return mark == s.mark })
}

// Orphans lists the living processes of stages whose makers have ended.
func Orphans() []int {
	return marked(func(mark string) bool {
		var maker, number int
		var since uint64
		_, err := fmt.Sscanf(mark, "%d-%d-%d", &maker, &since, &number)
		return err == nil && begun(maker) != since
	})
}

// marked lists the living processes with a mark that is wanted.
func marked(wanted func(mark string) bool) []int {
	var pids []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || state(pid) == 'Z' {
			continue
		}
		env, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ")) // another user's cannot be read
		for _, v := range strings.Split(string(env), "\x00") {
			if mark, ok := strings.CutPrefix(v, markName+"="); ok && wanted(mark) {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

// state is a process's letter, 0 when there is none.
func state(pid int) byte {
	if f := stat(pid); len(f) > 0 {
		return f[0][0]
	}
	return 0
}

// begun is when a process began, in the clock ticks of its host since it was booted; 0 when there is none.
func begun(pid int) uint64 {
	const at = 22 - 3 // of proc(5)'s fields
	f := stat(pid)
	if len(f) <= at || f[0] == "Z" {
		return 0
	}
	ticks, _ := strconv.ParseUint(f[at], 10, 64)
	return ticks
}

// stat is /proc/PID/stat from the state on: what is before may hold anything.
func stat(pid int) []string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
}

// Children are a process's, and theirs.
func Children(pid int) []int {
	var all []int
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, task := range tasks {
		list, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		for _, word := range strings.Fields(string(list)) {
			if child, err := strconv.Atoi(word); err == nil {
				all = append(append(all, child), Children(child)...)
			}
		}
	}
	return all
}

func describe(pids []int) string {
	var out []string
	for _, pid := range pids {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		line := strings.ReplaceAll(string(b), "\x00", " ")
		out = append(out, fmt.Sprintf("%d (%c) %.80s", pid, state(pid), line))
	}
	return strings.Join(out, "; ")
}

// Tail is the end of a file.
func Tail(path string, n int) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-n):])
}

// pollEvery is how often a condition of another process is looked at.
const pollEvery = 20 * time.Millisecond

// stalled is what limits are to be longer by, because the machine did other things.
var stalled, _ = stall.Begin()

// Poll looks until cond is content, and returns its last word if that takes longer than the limit.
func Poll(ctx context.Context, limit time.Duration, cond func() error) error {
	begun, before := time.Now(), stalled()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		err := cond()
		if err == nil {
			return nil
		}
		if time.Since(begun) > limit+stalled()-before {
			return fmt.Errorf("not within %s: %w", limit, err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

// Headrace starts a `headrace` command of the stage with more variables.
func (s *Stage) Headrace(name string, env []string, args ...string) (*Process, error) {
	return s.start(name, env, append([]string{s.Env.Binary}, args...)...)
}

// Wait waits for a process that ends by itself, with what its log says where it does not end well.
func (p *Process) Wait(ctx context.Context, limit time.Duration) error {
	err := Poll(ctx, limit, func() error {
		select {
		case <-p.done:
			return nil
		default:
			return fmt.Errorf("%s runs; its log ends with:\n%s", p.Name, Tail(p.Log, 4000))
		}
	})
	if err == nil && p.err != nil {
		return p.ended()
	}
	return err
}

// CommandLine is a process's, with spaces between its words.
func CommandLine(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " "))
}
