package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/bench"
	"github.com/headrace/headrace/internal/config"
)

func (a *app) benchModel() *cobra.Command {
	var (
		o      bench.ModelOptions
		memory config.Size
		rates  []string
		quick  bool
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "model",
		Short: "Measure the transfer of published models' KV cache, and its share of the time to the first token",
		Example: `  headrace bench model --quick
  headrace bench model --models llama-3-8b,deepseek-v3 --tokens 4096 --prefill-rate 12000
  headrace bench model --prefill-rate llama-3-70b=3000 --json`,
		Args: noArgs,
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Transport, "transport", "all", "tcp, shm or all")
	fs.StringSliceVar(&o.Models, "models", nil, "models (default all): "+modelNames())
	fs.IntSliceVar(&o.Tokens, "tokens", nil, "prompt lengths (default 512,2048,8192,32768)")
	fs.Var(&memory, "memory", "for the KV of both sides, as 8GiB (default half of what is free)")
	fs.Float64Var(&o.TFLOPS, "tflops", 0, "what prefill is assumed to sustain, in TFLOP/s (default 400)")
	fs.StringSliceVar(&rates, "prefill-rate", nil, "assumed prefill in `tokens/s`, for all models or as MODEL=TOKENS/S, in place of --tflops")
	fs.IntVar(&o.Lanes, "lanes", 0, "streams of a channel (default: the daemon's choice)")
	fs.IntVar(&o.Rounds, "rounds", 0, "transfers of each prompt (default 3)")
	fs.BoolVar(&quick, "quick", false, "two models and two lengths")
	fs.BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o.Memory, o.Progress = int64(memory), a.progress()
		if quick && len(o.Models) == 0 {
			o.Models = []string{"llama-3-8b", "deepseek-v2-lite"}
		}
		if quick && len(o.Tokens) == 0 {
			o.Tokens = []int{512, 4096}
		}
		var err error
		if o.Rates, err = prefillRates(rates); err != nil {
			return config.Misused(err)
		}
		if err := o.Check(); err != nil {
			return config.Misused(err)
		}
		_, err = measured(cmd.Context(), a.out, o, asJSON, bench.Model, bench.PrintModel)
		return err
	}
	return cmd
}

func modelNames() string {
	var names []string
	for _, g := range bench.Geometries {
		names = append(names, g.Name)
	}
	return strings.Join(names, ", ")
}

// prefillRates reads TOKENS/S, for all models, and MODEL=TOKENS/S.
func prefillRates(list []string) (map[string]float64, error) {
	rates := map[string]float64{}
	for _, text := range list {
		name, value, named := strings.Cut(text, "=")
		if !named {
			name, value = "", text
		}
		rate, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return nil, fmt.Errorf("--prefill-rate %q: use TOKENS/S or MODEL=TOKENS/S", text)
		}
		rates[name] = rate
	}
	return rates, nil
}
