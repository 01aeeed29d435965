package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/gguf"
	"github.com/headrace/headrace/worker/tinymodel"
)

func (a *app) tinyModel() *cobra.Command {
	var (
		o     tinymodel.Options
		out   string
		dtype string
	)
	cmd := &cobra.Command{
		Use:     "tinymodel",
		Short:   "Write a small model made from a seed, for tests",
		Example: `  headrace tinymodel --seed 1 --out tiny.gguf`,
		Hidden:  true,
	}
	cmd.Flags().Uint64Var(&o.Seed, "seed", 1, "the same seed gives the same file")
	cmd.Flags().StringVar(&dtype, "dtype", "F32", "`type` of the matrices: F32, F16, BF16, Q8_0, Q4_0 or Q4_1")
	cmd.Flags().IntVar(&o.KVHeads, "kv-heads", 2, "key heads: 1, 2 or 4; tensor-parallel ranks share them evenly")
	cmd.Flags().IntVar(&o.Layers, "layers", 4, "layers")
	cmd.Flags().StringVar(&out, "out", "", "`file` to write")
	cmd.RunE = func(*cobra.Command, []string) error {
		if out == "" {
			return config.Misused(errors.New("--out is needed: which file to write"))
		}
		var err error
		if o.DType, err = gguf.ParseType(dtype); err != nil {
			return config.Misused(fmt.Errorf("--dtype: %w", err))
		}
		return tinymodel.Write(out, o)
	}
	return cmd
}
