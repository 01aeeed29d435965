package planbench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// Print writes the report for people, or as one JSON document.
func Print(w io.Writer, r *Report, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	if b := r.Burst; b != nil {
		fmt.Fprintf(w, "%d instances on %d empty nodes of %d GPUs: %.3f s (%.0f a second), after %.3f s to read the cluster\n\n", b.Instances, b.Nodes, r.GPUs, b.Seconds, b.Rate, b.BuildSeconds)
	}
	fmt.Fprintln(w, "steady state: one leaves at random, one comes; us of a placement")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "nodes\tinstances\tVRAM\tplacements/s\tfill/s\tchurn/s\tmean\tp50\tp99\tmax\tallocs\tbytes/node\tscan us\tscan/index\twith reasons us\t")
	for _, x := range r.Rows {
		fmt.Fprintf(t, "%d\t%d\t%.0f%%\t%.0f\t%.0f\t%.0f\t%.2f\t%.2f\t%.2f\t%.0f\t%.3f\t%.0f\t%.1f\t%.1f\t%.0f\t\n", x.Nodes, x.Filled, 100*x.Share, x.Rate, x.FillRate, x.ChurnRate, x.MeanMicros, x.P50Micros, x.P99Micros, x.MaxMicros, x.Allocs, x.NodeBytes, x.ScanMicros, x.ScanRatio, x.ExplainedUs)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	fmt.Fprintf(w, "\ncost ~ nodes^%.2f\n", r.Growth)
	for _, v := range r.Verdicts {
		word := "holds"
		if !v.Met {
			word = "does not hold"
		}
		fmt.Fprintf(w, "%s: %s (%.4g)\n", word, v.Target, v.Measured)
	}
	_, err := fmt.Fprintf(w, "%d CPUs, %s, seed %d\n", r.CPUs, r.Go, r.Seed)
	if !r.Complete {
		_, err = fmt.Fprintln(w, "INTERRUPTED: this is what was measured so far")
	}
	return err
}
