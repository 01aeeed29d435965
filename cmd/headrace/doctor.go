package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/doctor"
)

func (a *app) doctor() *cobra.Command {
	var (
		asJSON    bool
		transport string
	)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Show what this build and this host can do, and how to change what they cannot",
		Long: `Doctor looks at this build and this host and says of each thing yes, no or unknown. To what is missing it says what to
do, and where a command does it the command: for root's shell ("#"), with what is to be filled in in capitals.
The exit status is 0, or 1 when something is missing that is needed; with --transport rdma that is all RDMA does not work without.`,
		Example: `  headrace doctor
  headrace doctor --transport rdma --json`,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	addTransport(cmd.Flags(), &transport)
	cmd.RunE = func(*cobra.Command, []string) error {
		r := doctor.Run(os.DirFS("/"))
		if transport == "rdma" {
			r.NeedRDMA()
		}
		if err := r.Print(a.out, asJSON); err != nil {
			return err
		}
		if !r.OK() {
			return errors.New("this host lacks what is needed, see above")
		}
		return nil
	}
	return cmd
}
