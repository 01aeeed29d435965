package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// helper is a program that stays and answers one line for each line it reads. It runs in a process group of its own, so
// that a Ctrl-C is this process's to act on, and dies with this process.
type helper struct {
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	said *tail
}

// helperTimeout bounds one answer: whatever takes longer is not worth waiting for.
const helperTimeout = 60 * time.Second

func startHelper(ctx context.Context, name string, env []string, argv ...string) (*helper, error) {
	h := &helper{name: name, said: &tail{}, cmd: ownGroup(exec.CommandContext(ctx, argv[0], argv[1:]...))}
	h.cmd.Env = append(os.Environ(), env...)
	h.cmd.Stderr = h.said
	var err error
	if h.in, err = h.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	h.out = bufio.NewReader(out)
	if err := h.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return h, nil
}

// ownGroup makes a command's end take along what it started, and this process's end the command.
func ownGroup(cmd *exec.Cmd) *exec.Cmd {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	return cmd
}

// ask sends a line, if there is one to send, and decodes the answer.
func (h *helper) ask(line string, answer any) error {
	kill := time.AfterFunc(helperTimeout, h.kill)
	defer kill.Stop()
	if line != "" {
		if _, err := io.WriteString(h.in, line+"\n"); err != nil {
			return fmt.Errorf("ask %s: %w%s", h.name, err, h.said.quoted())
		}
	}
	got, err := h.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("wait for %s to answer %q: %w%s", h.name, line, err, h.said.quoted())
	}
	if err := json.Unmarshal(got, answer); err != nil {
		return fmt.Errorf("read the answer of %s, %q: %w", h.name, got, err)
	}
	return nil
}

func (h *helper) kill() { _ = h.cmd.Cancel() }

// stop ends the helper: by the end of its input, else by force.
func (h *helper) stop() {
	if h == nil {
		return
	}
	_ = h.in.Close()
	kill := time.AfterFunc(2*time.Second, h.kill)
	defer kill.Stop()
	_ = h.cmd.Wait()
	h.kill() // whatever is left of its group
}

// tail keeps the end of what a program says, for the error message.
type tail struct {
	mu   sync.Mutex
	text []byte
}

const tailBytes = 2000

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if over := len(t.text) - tailBytes; over > 0 {
		t.text = t.text[over:]
	}
	return len(b), nil
}

// last is the last line that is not empty.
func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(string(t.text)), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

func (t *tail) quoted() string {
	if s := t.last(); s != "" {
		return fmt.Sprintf(" (it said %q)", s)
	}
	return ""
}
