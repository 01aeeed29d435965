package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/doctor"
)

func (a *app) doctor() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "doctor",
		Short:   "Show what this build and this host can do, and how to change what they cannot",
		Example: `  headrace doctor`,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.RunE = func(*cobra.Command, []string) error {
		r := doctor.Run(os.DirFS("/"))
		if err := r.Print(a.out, asJSON); err != nil {
			return err
		}
		if !r.OK() {
			return errors.New("this host lacks what Headrace needs, see above")
		}
		return nil
	}
	return cmd
}
