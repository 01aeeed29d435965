package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/config"
)

// Exit statuses.
const (
	exitDone    = 0
	exitFailed  = 1
	exitMisused = 2
)

// app is what all subcommands share.
type app struct {
	out, err  io.Writer
	config    string
	logLevel  string
	logFormat string
}

// run executes a command line and returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	a := &app{out: stdout, err: stderr}
	root := a.root()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitDone
	}
	text := strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ")
	if errors.As(err, new(*config.Misuse)) {
		fmt.Fprintf(stderr, "%s: %s (see %s --help)\n", cmd.CommandPath(), text, cmd.CommandPath())
		return exitMisused
	}
	fmt.Fprintf(stderr, "%s: %s\n", cmd.CommandPath(), text)
	return exitFailed
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "headrace",
		Short: "Move KV cache between inference engines, and route requests to prefill and decode",
		Long: `Headrace moves KV cache between inference engines and routes requests between those that prefill and those that
decode. "headrace up" runs everything on this machine; the other subcommands are the same parts, one a process.

Options come from a YAML file (--config), from HEADRACE_ variables (HEADRACE_DATA_DIR for --data-dir) and from flags,
each stronger than the one before. A section of the file named after a subcommand is for that one only.`,
		Example:           "  headrace up",
		Args:              cobra.ArbitraryArgs,
		SilenceErrors:     true,
		SilenceUsage:      true,
		RunE:              group,
		PersistentPreRunE: a.applyConfig,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.SetFlagErrorFunc(flagError)
	fs := root.PersistentFlags()
	fs.StringVar(&a.config, "config", os.Getenv(config.EnvName("config")), "YAML `file` with options")
	fs.StringVar(&a.logLevel, "log-level", "info", "debug, info, warn or error")
	fs.StringVar(&a.logFormat, "log-format", "text", "text or json")
	root.AddCommand(a.up(), a.upgrade(), a.node(), a.worker(), a.standin(), a.engine(), a.engineGuard(), a.connector(), a.router(), a.planner(), a.key(), a.status(), a.drain(), a.trace(), a.doctor(), a.schedule(), a.plan(), a.profile(), a.bench(), a.model(), a.tinyModel(), a.version())
	for _, cmd := range root.Commands() {
		if cmd.Args == nil {
			cmd.Args = noArgs
		}
	}
	return root
}

// group is what a command that only has subcommands does: help, or what the unknown word may have meant.
func group(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	hint := ""
	for cmd.SuggestionsMinimumDistance = 1; hint == "" && cmd.SuggestionsMinimumDistance <= 3; cmd.SuggestionsMinimumDistance++ {
		if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
			hint = fmt.Sprintf("; did you mean %q?", near[0])
		}
	}
	return config.Misused(fmt.Errorf("unknown command %q%s", args[0], hint))
}

func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return config.Misused(fmt.Errorf("unexpected argument %q", args[0]))
	}
	return nil
}

// flagError adds the flag that was probably meant.
func flagError(cmd *cobra.Command, err error) error {
	if unknown := (*pflag.NotExistError)(nil); errors.As(err, &unknown) {
		best, distance := "", 4
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if d := editDistance(f.Name, unknown.GetSpecifiedName()); d < distance && !f.Hidden {
				best, distance = f.Name, d
			}
		})
		if best != "" {
			err = fmt.Errorf("%w; did you mean --%s?", err, best)
		}
	}
	return config.Misused(err)
}

// editDistance counts the letters to insert, delete, replace or swap between two words.
func editDistance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}

// applyConfig fills in what was not given on the command line.
func (a *app) applyConfig(cmd *cobra.Command, _ []string) error {
	words := knownWords(cmd.Root())
	return config.Misused(config.Apply(cmd.Flags(), config.Source{
		File: a.config, Env: os.Environ(), Section: cmd.Name(),
		Known: func(word string) bool { return slices.Contains(words, word) },
	}))
}

func knownWords(cmd *cobra.Command) []string {
	words := []string{cmd.Name()}
	add := func(f *pflag.Flag) { words = append(words, f.Name) }
	cmd.Flags().VisitAll(add)
	cmd.PersistentFlags().VisitAll(add)
	for _, sub := range cmd.Commands() {
		words = append(words, knownWords(sub)...)
	}
	return words
}
