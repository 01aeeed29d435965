package bench

import (
	"fmt"
	"io"
	"strconv"
)

// printPosts writes what posting costs.
func (r *Report) printPosts(w io.Writer) {
	var cells [][]string
	for _, p := range r.Posts {
		cells = append(cells, []string{strconv.Itoa(p.Blocks), f2(p.Ours), f2(p.Loop), f2(p.Chain), fmt.Sprintf("%.2f (%.2f-%.2f)", p.Ratio, p.RatioMin, p.RatioMax), f2(p.PerSec / 1e6)})
	}
	table(w, "posting scattered blocks to a provider that does nothing, us", []string{"blocks", ours, "C loop", "C chains of 64", "ours/faster", "million posts/s"}, cells)
}

// printRDMA writes the parts that only RDMA has.
func (r *Report) printRDMA(w io.Writer, t string) {
	if t != "rdma" {
		return
	}
	var cells [][]string
	rows := r.rows(partSizes, t)
	list := names(rows)
	perSecond := func(s *Series, block int) string { return strconv.FormatFloat(s.GBps*1e9/float64(block), 'f', 0, 64) }
	for _, row := range rows {
		line := []string{size(row.BlockBytes), perSecond(&row.Ours, row.BlockBytes)}
		for _, n := range list {
			line = append(line, cell(row.other(n), func(o *Other) string { return perSecond(&o.Series, row.BlockBytes) }))
		}
		cells = append(cells, line)
	}
	table(w, "posts a second over "+t+", one a block", append([]string{"block", ours}, list...), cells)
	r.printRows(w, partRails, t, "rails of a channel over "+t+", blocks of 64 KiB", "rails", func(row *Row) string { return strconv.Itoa(row.Rails) })
	r.printShares(w, t)
	r.printRows(w, partCompletions, t, "completions over "+t+": parked beside polled for", "block", func(row *Row) string { return size(row.BlockBytes) })
	r.printCompletionsCPU(w, t)
}

func (r *Report) printShares(w io.Writer, t string) {
	var cells [][]string
	for _, row := range r.rows(partRails, t) {
		for _, c := range row.RailShares {
			cells = append(cells, []string{strconv.Itoa(row.Rails), c.Name, f2(c.Share)})
		}
	}
	table(w, "the same, what each rail carried", []string{"rails", "rail", "share"}, cells)
}

func (r *Report) printCompletionsCPU(w io.Writer, t string) {
	var cells [][]string
	for _, row := range r.rows(partCompletions, t) {
		if o := row.other(oursSpinning); o != nil {
			cells = append(cells, []string{size(row.BlockBytes), f2(row.Ours.CPUPerGB), f2(o.CPUPerGB)})
		}
	}
	table(w, "the same, CPU seconds a GB of the whole machine", []string{"block", ours, oursSpinning}, cells)
}
