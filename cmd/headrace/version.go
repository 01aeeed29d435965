package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/version"
)

func (a *app) version() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Show which build this is",
		Example: `  headrace version --json`,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(*cobra.Command, []string) error {
		v := version.Get()
		if asJSON {
			return json.NewEncoder(a.out).Encode(v)
		}
		_, err := fmt.Fprintf(a.out, "headrace %s (%s, %s)\n", v.Version, v.Go, v.Platform)
		return err
	}
	return cmd
}
