package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/headrace/headrace/internal/supervise"
)

func terminal() bool { return term.IsTerminal(int(os.Stderr.Fd())) }

// upgradeOnRequest makes a node daemon start the program that is at its path now, to take over from it, at each signal
// for that. One that is supervised asks its supervisor, whose child the new one must be.
func upgradeOnRequest(ctx context.Context, parentFD int, log *slog.Logger) (stop func()) {
	exe, err := os.Executable() // now: once the file is replaced, the kernel says only that it is gone
	requests, ignore := supervise.UpgradeRequests(terminal())
	args := slices.Clone(os.Args[1:])
	if !slices.Contains(args, "--takeover") {
		args = append(args, "--takeover")
	}
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-requests:
			}
			switch {
			case parentFD > 0:
				log.Info("asked to be upgraded: asking the supervisor to")
				_ = syscall.Kill(os.Getppid(), supervise.UpgradeSignal)
			case err != nil:
				log.Error("asked to be upgraded, but cannot find this program", "err", err)
			default:
				startSuccessor(exe, args, log)
			}
		}
	}()
	return ignore
}

// startSuccessor starts a daemon that asks this one for its place. Whatever becomes of it, this one goes on until then.
func startSuccessor(exe string, args []string, log *slog.Logger) {
	cmd := exec.Command(exe, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		log.Error("asked to be upgraded, but the new program does not start: this daemon goes on", "program", exe, "err", err)
		return
	}
	log.Info("started a new daemon to take over", "program", exe, "pid", cmd.Process.Pid)
	go func() {
		if err := cmd.Wait(); err != nil {
			log.Error("the new daemon has ended: this one goes on", "pid", cmd.Process.Pid, "err", err)
		}
	}()
}

func (a *app) upgrade() *cobra.Command {
	var (
		dataDir string
		timeout time.Duration
	)
	cmd := &cobra.Command{
		Use:   "upgrade",
		Short: "Replace the node daemons of the running \"headrace up\", one after another, while requests go on",
		Long: `Upgrade makes "headrace up" start each node daemon anew from the program that is at its path now, and let it take the
place of the running one: workers are not restarted, transfers under way end at the old daemon, requests see a pause of
milliseconds. A single daemon (headrace node) does the same on SIGHUP.`,
		Example: `  install headrace /usr/local/bin/headrace && headrace upgrade`,
	}
	addDataDir(cmd.Flags(), &dataDir)
	addSpan(cmd.Flags(), &timeout, "timeout", 10*time.Minute, "how long to wait for the end of it")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		before, err := running(dataDir, "say where with --data-dir")
		if err != nil {
			return err
		}
		if before.Upgrade.Running {
			return errors.New("an upgrade is under way already")
		}
		if err := syscall.Kill(before.PID, supervise.UpgradeSignal); err != nil {
			return fmt.Errorf("ask process %d: %w", before.PID, err)
		}
		return a.followUpgrade(ctx, dataDir, before.Upgrade.Count)
	}
	return cmd
}

// followUpgrade prints a line for each daemon as it is replaced.
func (a *app) followUpgrade(ctx context.Context, dataDir string, count int) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for said := 0; ; {
		select {
		case <-ctx.Done():
			return errors.New("the upgrade has not ended; see the log of headrace up")
		case <-tick.C:
		}
		s, err := supervise.ReadState(dataDir)
		if err != nil {
			return err
		}
		if s.Upgrade.Count == count {
			continue // not begun
		}
		for ; said < len(s.Upgrade.Done); said++ {
			fmt.Fprintln(a.out, s.Upgrade.Done[said])
		}
		switch {
		case s.Upgrade.Running:
		case s.Upgrade.Error != "":
			return errors.New(s.Upgrade.Error)
		default:
			return nil
		}
	}
}
