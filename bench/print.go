package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Print writes a report: tables, or with asJSON the document.
func Print(w io.Writer, r *Report, asJSON bool) error {
	if asJSON {
		return printJSON(w, r)
	}
	r.printPosts(w)
	for _, t := range []string{"tcp", "shm", "rdma"} {
		r.printSizes(w, t)
		r.printLatency(w, t)
		r.printRows(w, partBatches, t, "requests one at a time over "+t, "blocks a request", func(row *Row) string { return fmt.Sprintf("%d x %s", row.BatchBlocks, size(row.BlockBytes)) })
		r.printRows(w, partLanes, t, "lanes of a channel over "+t, "lanes, block", func(row *Row) string { return fmt.Sprintf("%d, %s", row.Lanes, size(row.BlockBytes)) })
		r.printEngines(w, t)
		r.printRDMA(w, t)
	}
	r.printVerdicts(w)
	fmt.Fprintf(w, "medians of %d rounds in alternating order, ratios of neighbours, GB = 10^9 bytes; engines speak to daemons by %s\n", r.Rounds, r.Submission)
	for _, c := range r.Contestants {
		fmt.Fprintf(w, "  %s (%s): %s\n", c.Name, c.Transport, c.What)
	}
	for _, n := range r.NotMeasured {
		fmt.Fprintln(w, n)
	}
	m := r.Machine
	_, err := fmt.Fprintf(w, "%s profile, %.0f s; %d CPUs, load %s before, up to %.2f cores used by others, %s, %s\n", r.Profile, r.Seconds, m.CPUs, m.Load1, m.ForeignCores, m.Kernel, m.Go)
	if m.ForeignCores > busyCores {
		_, err = fmt.Fprintf(w, "others used the CPUs too (foreign_cores in --json says beside which rows): measure again on a quiet machine\n")
	}
	if !r.Complete {
		_, err = fmt.Fprintln(w, "INTERRUPTED: this is what was measured so far")
	}
	return err
}

func printJSON(w io.Writer, doc any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(doc)
}

// busyCores is how much of others' work makes figures doubtful. Below it are the kernel's own threads and the clock's ticks.
const busyCores = 0.2

// table writes rows of cells aligned to the right.
func table(w io.Writer, title string, head []string, rows [][]string) {
	if len(rows) == 0 {
		return
	}
	fmt.Fprintln(w, title)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, cells := range append([][]string{head}, rows...) {
		fmt.Fprintln(t, strings.Join(cells, "\t")+"\t")
	}
	_ = t.Flush()
	fmt.Fprintln(w)
}

func size(n int) string {
	if n >= mib {
		return strconv.Itoa(n/mib) + " MiB"
	}
	return strconv.FormatFloat(float64(n)/kib, 'g', -1, 64) + " KiB"
}

// f2 gives two decimals, and of what is small three digits.
func f2(v float64) string {
	if v > 0 && v < 0.1 {
		return strconv.FormatFloat(v, 'g', 3, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

// names lists the contestants of a set of rows in order of appearance.
func names(rows []*Row) []string {
	var list []string
	seen := map[string]bool{}
	for _, row := range rows {
		for _, o := range row.Others {
			if !seen[o.Name] {
				seen[o.Name] = true
				list = append(list, o.Name)
			}
		}
	}
	return list
}

func (r *Report) printSizes(w io.Writer, t string) {
	r.printRows(w, partSizes, t, "scattered blocks over "+t, "block", func(row *Row) string { return size(row.BlockBytes) })
	rows := r.rows(partSizes, t)
	list := names(rows)
	var cells [][]string
	for _, row := range rows {
		line := []string{size(row.BlockBytes), f2(row.Ours.CPUPerGB)}
		for _, n := range list {
			line = append(line, cell(row.other(n), func(o *Other) string { return orNone(o.CPUPerGB) }))
		}
		cells = append(cells, line)
	}
	whose := "all processes"
	if t == "rdma" {
		whose = "the whole machine"
	}
	table(w, "CPU seconds a GB, "+whose+", over "+t, append([]string{"block", ours}, list...), cells)
}

// orNone is f2 where there is something to say.
func orNone(v float64) string {
	if v == 0 {
		return "-"
	}
	return f2(v)
}

func cell(o *Other, of func(*Other) string) string {
	if o == nil {
		return "-"
	}
	return of(o)
}

// printRows writes ours and for each other its rate, the ratio and the ratio's range.
func (r *Report) printRows(w io.Writer, part, t, title, key string, keyOf func(*Row) string) {
	rows := r.rows(part, t)
	list := names(rows)
	head := []string{key, ours}
	for _, n := range list {
		head = append(head, n, "ours/theirs")
	}
	var cells [][]string
	for _, row := range rows {
		line := []string{keyOf(row), f2(row.Ours.GBps)}
		for _, n := range list {
			o := row.other(n)
			line = append(line, cell(o, func(o *Other) string { return f2(o.GBps) }),
				cell(o, func(o *Other) string { return fmt.Sprintf("%.2f (%.2f-%.2f)", o.Ratio, o.RatioMin, o.RatioMax) }))
		}
		cells = append(cells, line)
	}
	table(w, title+", GB/s", head, cells)
}

func (r *Report) printLatency(w io.Writer, t string) {
	var cells [][]string
	for _, l := range r.Latency {
		if l.Transport != t {
			continue
		}
		line := []string{size(l.BlockBytes), l.Name}
		for _, v := range []float64{l.P50, l.P90, l.P99, l.P999, l.Max} {
			line = append(line, strconv.FormatFloat(v, 'f', 1, 64))
		}
		cells = append(cells, append(line, strconv.Itoa(l.Samples)))
	}
	table(w, "one block at a time over "+t+", us", []string{"block", "", "p50", "p90", "p99", "p99.9", "max", "samples"}, cells)
}

func (r *Report) printEngines(w io.Writer, t string) {
	var cells [][]string
	for _, row := range r.rows(partEngines, t) {
		var each []string
		for _, g := range row.Fairness.GBps {
			each = append(each, f2(g))
		}
		cells = append(cells, []string{strconv.Itoa(row.Engines), f2(row.Ours.GBps), strings.Join(each, " "), strconv.FormatFloat(row.Fairness.Jain, 'f', 4, 64), f2(row.Fairness.MinOverMax)})
	}
	table(w, "pairs of engines at a time over "+t+", blocks of 64 KiB", []string{"pairs", "all GB/s", "each GB/s", "Jain", "min/max"}, cells)
}

func (r *Report) printVerdicts(w io.Writer) {
	fmt.Fprintln(w, "targets")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, v := range r.Verdicts {
		value := "-"
		if v.Measured != nil {
			value = f2(*v.Measured)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", v.State, value, v.Target, v.Detail)
	}
	_ = t.Flush()
	fmt.Fprintln(w)
}
