package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/worker/tinymodel"
)

func (a *app) tinyModel() *cobra.Command {
	var (
		o   tinymodel.Options
		out string
	)
	cmd := &cobra.Command{
		Use:     "tinymodel",
		Short:   "Write a small model made from a seed, for tests",
		Example: `  headrace tinymodel --seed 1 --out tiny.gguf`,
		Hidden:  true,
	}
	cmd.Flags().Uint64Var(&o.Seed, "seed", 1, "the same seed gives the same file")
	cmd.Flags().IntVar(&o.KVHeads, "kv-heads", 2, "key heads: 1, 2 or 4; tensor-parallel ranks share them evenly")
	cmd.Flags().IntVar(&o.Layers, "layers", 4, "layers")
	cmd.Flags().StringVar(&out, "out", "", "`file` to write")
	cmd.RunE = func(*cobra.Command, []string) error {
		if out == "" {
			return config.Misused(errors.New("--out is needed: which file to write"))
		}
		return tinymodel.Write(out, o)
	}
	return cmd
}
