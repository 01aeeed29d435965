package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/scheduler"
	"github.com/headrace/headrace/scheduler/cluster"
	"github.com/headrace/headrace/scheduler/estimate"
	"github.com/headrace/headrace/scheduler/snapfile"
)

func (a *app) schedule() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "schedule FILE",
		Short: "Decide from a written snapshot: placements, removals, evictions, each with its reasons",
		Long: `Reads a snapshot of a cluster (YAML, docs/scheduling.md; - for standard input) and prints the decision with every
filter's and score's figures. Nothing is started, stopped or asked: the same file gives the same bytes.`,
		Example: `  headrace schedule cluster.yaml
  headrace schedule cluster.yaml --json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return config.Misused(fmt.Errorf("name one snapshot file, or - for standard input"))
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		s, err := readSnapshot(args[0])
		if err != nil {
			return err
		}
		d, err := scheduler.Decide(s)
		if err != nil {
			return fmt.Errorf("decide on %s: %w", args[0], err)
		}
		if asJSON {
			return scheduler.WriteJSON(a.out, d)
		}
		return scheduler.WriteText(a.out, d)
	}
	return cmd
}

// readSnapshot reads a snapshot and, for claims that name a model file, that file's header. Such a name is relative to the snapshot.
func readSnapshot(path string) (*cluster.Snapshot, error) {
	name := path
	if path == "-" {
		name = "/dev/stdin"
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read the snapshot: %w", err)
	}
	s, err := snapfile.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for i := range s.Models {
		m := &s.Models[i]
		if m.Claim.File == "" {
			continue
		}
		file := m.Claim.File
		if !filepath.IsAbs(file) {
			file = filepath.Join(filepath.Dir(name), file)
		}
		if err := fillClaim(m, file); err != nil {
			return nil, fmt.Errorf("%s: line %d: model %s: %w", path, m.Line, m.Name, err)
		}
	}
	return s, nil
}

func fillClaim(m *cluster.Model, file string) error {
	f, err := gguf.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := estimate.Fill(&m.Claim, f); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}
