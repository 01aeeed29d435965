package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/connectors/vllm"
	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/connector"
)

func (a *app) connector() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "connector",
		Short: "Hand out the connector for vLLM that is in this program",
		Long: `Connector hands out the Python package with Headrace's connector for vLLM. headrace engine and headrace up need neither
of these: they give the package to the engines that they start.`,
		Example: `  headrace connector wheel . && pip install headrace-*.whl
  PYTHONPATH=$(headrace connector path) vllm serve ...`,
		Args: cobra.ArbitraryArgs,
		RunE: group,
	}
	wheel := &cobra.Command{
		Use:     "wheel FOLDER",
		Short:   "Write it as a wheel and print the wheel's path",
		Example: `  headrace connector wheel . && pip install headrace-*.whl`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return config.Misused(errors.New("name one folder for the wheel"))
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return fmt.Errorf("write wheel: %w", err)
			}
			name, err := connector.Wheel(vllm.Files, args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.out, name)
			return err
		},
	}
	path := &cobra.Command{
		Use:     "path",
		Short:   "Unpack it into the cache and print the folder for PYTHONPATH",
		Example: `  PYTHONPATH=$(headrace connector path) vllm serve ...`,
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			dir, err := unpackConnector()
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.out, dir)
			return err
		},
	}
	cmd.AddCommand(wheel, path)
	return cmd
}

// unpackConnector puts the connector in this program where Python finds it.
func unpackConnector() (string, error) {
	cache, err := config.CacheDir()
	if err != nil {
		return "", err
	}
	return connector.Unpack(vllm.Files, cache)
}
