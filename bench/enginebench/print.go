package enginebench

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// Print writes a report: a table, or with asJSON the document.
func Print(w io.Writer, r *Report, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "what\tcontext\tbatch\ttokens/s\tlowest\thighest\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%d\t%d\t%.1f\t%.1f\t%.1f\t\n", row.What, row.Context, row.Batch, row.Rate, slices.Min(row.Rounds), slices.Max(row.Rounds))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if s := r.Startup; s != nil {
		fmt.Fprintf(w, "a worker process is ready %.0f ms after its start; resident %.0f MB: %.0f of files (weights and program), %.0f KV, %.0f other\n",
			s.ReadyMs, s.ResidentMB, s.WeightsMB, s.KVMB, s.AnonymousMB)
	}
	_, err := fmt.Fprintf(w, "%s (%s, %.0f MB of weights), %d threads, %s kernels, loaded in %.0f ms; medians\n", r.Model, r.Type, r.WeightsMB, r.Threads, r.Kernel, r.LoadMs)
	return err
}
