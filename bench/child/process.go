// Package child runs programs beside a benchmark: those that answer lines, and parts of the benchmark itself, which are
// this same program, told by its environment what to be. It must not know what is measured.
package child

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is a program that stays and answers one line for each line it reads. It runs in a process group of its own, so
// that a Ctrl-C is this process's to act on, and dies with this process.
type Process struct {
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	said *Tail
}

// answerTimeout bounds one answer: whatever takes longer is not worth waiting for.
const answerTimeout = 60 * time.Second

// Start runs a program. name is what errors call it, env what its environment has beside ours. What it says on its standard
// error goes to stderr too, unless that is nil.
func Start(ctx context.Context, name string, env []string, stderr io.Writer, argv ...string) (*Process, error) {
	p := &Process{name: name, said: &Tail{}, cmd: OwnGroup(exec.CommandContext(ctx, argv[0], argv[1:]...))}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = p.said
	if stderr != nil {
		p.cmd.Stderr = io.MultiWriter(p.said, stderr)
	}
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// OwnGroup makes a command's end take along what it started, and this process's end the command.
func OwnGroup(cmd *exec.Cmd) *exec.Cmd {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	return cmd
}

// Ask sends a line, if there is one to send, and decodes the answer.
func (p *Process) Ask(line string, answer any) error {
	kill := time.AfterFunc(answerTimeout, p.kill)
	defer kill.Stop()
	if line != "" {
		if _, err := io.WriteString(p.in, line+"\n"); err != nil {
			return fmt.Errorf("ask %s: %w%s", p.name, err, p.said.Quoted())
		}
	}
	got, err := p.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("wait for %s to answer %q: %w%s", p.name, line, err, p.said.Quoted())
	}
	if err := json.Unmarshal(got, answer); err != nil {
		return fmt.Errorf("read the answer of %s, %q: %w", p.name, got, err)
	}
	return nil
}

// Group is the id of its process group.
func (p *Process) Group() int { return p.cmd.Process.Pid }

func (p *Process) kill() { _ = p.cmd.Cancel() }

// Stop ends it: by the end of its input, and after patience by force. It may be called once, and on nil. The error says how it
// ended, unless well.
func (p *Process) Stop(patience time.Duration) error {
	if p == nil {
		return nil
	}
	_ = p.in.Close()
	kill := time.AfterFunc(patience, p.kill)
	defer kill.Stop()
	err := p.cmd.Wait()
	p.kill() // whatever is left of its group
	if err != nil {
		return fmt.Errorf("end %s: %w%s", p.name, err, p.said.Quoted())
	}
	return nil
}

// Finish ends it as Stop does, and before that decodes into last the line that it says when its input has ended.
func (p *Process) Finish(patience time.Duration, last any) error {
	_ = p.in.Close()
	kill := time.AfterFunc(patience, p.kill)
	defer kill.Stop()
	err := p.Ask("", last)
	return errors.Join(err, p.Stop(patience))
}

// Tail keeps the end of what a program says, for the error message. The zero value is ready; it may be written to and read at once.
type Tail struct {
	mu   sync.Mutex
	text []byte
}

const tailBytes = 2000

func (t *Tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if over := len(t.text) - tailBytes; over > 0 {
		t.text = t.text[over:]
	}
	return len(b), nil
}

// Last is the last line that is not empty.
func (t *Tail) Last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return LastLine(string(t.text))
}

// Quoted is the last line as the end of an error's text, "" where nothing was said.
func (t *Tail) Quoted() string {
	if s := t.Last(); s != "" {
		return fmt.Sprintf(" (it said %q)", s)
	}
	return ""
}

// LastLine is the last line of a text that is not empty.
func LastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
