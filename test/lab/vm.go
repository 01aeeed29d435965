package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// machine is one virtual machine.
type machine struct {
	scenario       *scenario
	number         int
	kernel, initrd string
	dir            string // for its console's log and sockets
	accel          string
	emulator       *emulator
	report         *report
	cpu            time.Duration // that it took of the host, once it has ended
}

// run boots the machine and gives its output to the report.
func (m *machine) run(ctx context.Context) error {
	console := filepath.Join(m.dir, fmt.Sprintf("console-%d.log", m.number))
	memory := m.scenario.memory
	if memory == 0 {
		memory = 2048
	}
	// An emulated timer that gets no processor for a few ticks counts as broken, and Linux does not boot: hence no_timer_check.
	args := []string{
		"-nodefaults", "-display", "none", "-no-reboot", "-machine", "q35", "-cpu", "max", "-smp", "2", "-m", strconv.Itoa(memory),
		"-kernel", m.kernel, "-initrd", m.initrd,
		"-append", fmt.Sprintf("console=ttyS0 quiet panic=-1 no_timer_check net.ifnames=0 lab.vm=%d", m.number),
		"-serial", "file:" + console, "-serial", "stdio", "-accel", m.accel,
	}
	args = append(args, m.wires()...)
	for _, a := range m.scenario.qemu {
		args = append(args, strings.ReplaceAll(a, "{vm}", strconv.Itoa(m.number)))
	}
	cmd := m.emulator.command(ctx, args...)
	cmd.WaitDelay = 5 * time.Second
	var complaints strings.Builder
	cmd.Stderr = &complaints
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start qemu (scripts/deps.sh lab installs it): %w", err)
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		m.report.line(lines.Text())
	}
	err = cmd.Wait()
	m.cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	if err != nil || m.report.status < 0 {
		if ctx.Err() != nil {
			err = errors.Join(err, ctx.Err())
		}
		return fmt.Errorf("it ended without a status: %w: %s\n%s", err, complaints.String(), tail(console))
	}
	return nil
}

// wires joins two machines, once a rail: datagrams over a pair of unix sockets.
func (m *machine) wires() (args []string) {
	if m.scenario.count() == 1 {
		return nil
	}
	for rail := range m.scenario.netdevs() {
		near, far := fmt.Sprintf("%s/wire-%d-%d", m.dir, rail, m.number), fmt.Sprintf("%s/wire-%d-%d", m.dir, rail, 3-m.number)
		args = append(args,
			"-netdev", fmt.Sprintf("dgram,id=n%d,local.type=unix,local.path=%s,remote.type=unix,remote.path=%s", rail, near, far),
			"-device", fmt.Sprintf("virtio-net-pci,netdev=n%d,mac=52:54:00:00:%02x:%02x,host_mtu=4200", rail, rail, m.number))
	}
	return args
}

// tail is the end of a console's log: where a kernel says why it died.
func tail(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	return "console: ..." + string(b[max(0, len(b)-4000):])
}
