package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/headrace/headrace/test/lab/script"
)

// machine is one virtual machine.
type machine struct {
	number         int
	of             int
	kernel, initrd string
	dir            string // for its console's log and sockets
	memory, accel  string
	out            io.Writer
	mu             *sync.Mutex // of out
}

// run boots the machine, copies its report and gives the exit status of its commands.
func (m *machine) run(ctx context.Context) (int, error) {
	console := filepath.Join(m.dir, fmt.Sprintf("console-%d.log", m.number))
	args := []string{
		"-nodefaults", "-display", "none", "-no-reboot", "-machine", "q35", "-cpu", "max", "-smp", "2", "-m", m.memory,
		"-kernel", m.kernel, "-initrd", m.initrd,
		"-append", fmt.Sprintf("console=ttyS0 quiet panic=-1 lab.vm=%d", m.number),
		"-serial", "file:" + console, "-serial", "stdio",
	}
	args = append(args, "-accel", m.accel)
	if m.of > 1 {
		args = append(args, m.wire()...)
	}
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", args...)
	cmd.WaitDelay = 5 * time.Second
	var complaints strings.Builder
	cmd.Stderr = &complaints
	report, err := cmd.StdoutPipe()
	if err != nil {
		return 1, err
	}
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("start qemu (apt-get install -y qemu-system-x86): %w", err)
	}
	status := m.copy(report)
	if err := cmd.Wait(); err != nil || status < 0 {
		if ctx.Err() != nil {
			err = errors.Join(err, ctx.Err())
		}
		return 1, fmt.Errorf("machine %d ended without a status: %w: %s\n%s", m.number, err, complaints.String(), tail(console))
	}
	return status, nil
}

// wire joins two machines: datagrams over a pair of unix sockets.
func (m *machine) wire() []string {
	near, far := fmt.Sprintf("%s/wire-%d", m.dir, m.number), fmt.Sprintf("%s/wire-%d", m.dir, 3-m.number)
	return []string{
		"-netdev", fmt.Sprintf("dgram,id=n0,local.type=unix,local.path=%s,remote.type=unix,remote.path=%s", near, far),
		"-device", fmt.Sprintf("virtio-net-pci,netdev=n0,mac=52:54:00:00:00:%02x,host_mtu=4200", m.number),
	}
}

// copy copies the report line by line and gives the status that it ends with, -1 if there is none.
func (m *machine) copy(r io.Reader) (status int) {
	status = -1
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.TrimRight(lines.Text(), "\r")
		if v, ok := strings.CutPrefix(line, script.ExitMark); ok {
			if n, err := strconv.Atoi(v); err == nil {
				status = n
			}
			continue
		}
		m.mu.Lock()
		if m.of > 1 {
			fmt.Fprintf(m.out, "vm%d: ", m.number)
		}
		fmt.Fprintln(m.out, line)
		m.mu.Unlock()
	}
	return status
}

// tail is the end of a console's log: where a kernel says why it died.
func tail(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	return "console: ..." + string(b[max(0, len(b)-4000):])
}
