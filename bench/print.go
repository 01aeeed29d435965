package bench

import (
	"encoding/json"
	"fmt"
	"io"
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
	fmt.Fprintln(t, "transport\tblock KiB\tours GB/s\tlimit GB/s\tratio\tlowest\thighest\tours CPU s/GB\tlimit CPU s/GB\tone block p50/p99 us\tlimit is\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.0f/%.0f\t%s\t\n", row.Transport, row.BlockBytes>>10, row.OursGBps, row.LimitGBps,
			row.Ratio, row.RatioMin, row.RatioMax, row.OursCPUPerGB, row.LimitCPUPerGB, row.BlockP50Micros, row.BlockP99Micros, row.Limit)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "medians of alternating pairs; limits: %s; %d CPUs, load %s, %s, %s\n", r.Limits, r.Machine.CPUs, r.Machine.Load1, r.Machine.Kernel, r.Machine.Go)
	return err
}
