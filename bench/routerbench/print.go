package routerbench

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
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i := range r.Rows {
		row := &r.Rows[i]
		offered := ""
		if row.Rate > 0 {
			offered = fmt.Sprintf(", %.0f a second", row.Rate)
		}
		fmt.Fprintf(t, "%s: %s, %s, %d connections%s\n", row.Part, row.Kind, size(row.BodyBytes), row.Connections, offered)
		if row.Part == partPaced {
			printPaced(t, row)
			continue
		}
		fmt.Fprintln(t, "  \trequests/s\tours to it\tp50 us\tp99 us\tadded p50\tadded p99\tfirst p50\tCPU us\twaits\terrors")
		for k := range row.All {
			x := &row.All[k]
			ratio := ""
			if x.Ratio > 0 {
				ratio = fmt.Sprintf("%.2f (%.2f-%.2f)", x.Ratio, x.RatioMin, x.RatioMax)
			}
			fmt.Fprintf(t, "  %s\t%.0f\t%s\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.2f\t%d\n", x.Name, x.RPS, ratio, x.P50, x.P99, x.AddedP50, x.AddedP99, x.FirstP50, x.CPU, x.Switches, x.Errors)
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, v := range r.Verdicts {
		if v.Measured == nil {
			fmt.Fprintf(w, "%-14s %s\n", v.State, v.Target)
			continue
		}
		fmt.Fprintf(w, "%-14s %s: %.2f; %s\n", v.State, v.Target, *v.Measured, v.Detail)
	}
	for _, n := range r.NotMeasured {
		fmt.Fprintln(w, n)
	}
	if !r.Complete {
		fmt.Fprintln(w, "interrupted: the rest is missing")
	}
	return nil
}

// printPaced says when first events came, and what there was to wait for between others.
func printPaced(t io.Writer, row *Row) {
	fmt.Fprintln(t, "  \trequests/s\tfirst p50 us\tp99 us\tadded p50\tadded p99\tstall p50 us\tp99 us\tCPU us\twaits\terrors")
	for i := range row.All {
		x := &row.All[i]
		fmt.Fprintf(t, "  %s\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.2f\t%d\n", x.Name, x.RPS, x.FirstP50, x.FirstP99, x.AddedFirstP50, x.AddedFirstP99, x.StallP50, x.StallP99, x.CPU, x.Switches, x.Errors)
	}
	fmt.Fprintln(t)
}

func size(n int) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	case n%1000 == 0:
		return fmt.Sprintf("%d KB", n/1000)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}
