package bench

import (
	"errors"
	"fmt"
	"io"

	"github.com/headrace/headrace/bench/chart"
)

// SVG draws GB/s by block size, one chart a transport.
func SVG(w io.Writer, r *Report) error {
	var charts []chart.Chart
	for _, t := range []string{"tcp", "shm"} {
		if rows := r.rows(partSizes, t); len(rows) > 0 {
			charts = append(charts, rates(rows, t))
		}
	}
	if len(charts) == 0 {
		return errors.New("draw: rates by block size were not measured (--part sizes)")
	}
	return chart.SVG(w, charts)
}

func rates(rows []*Row, transport string) chart.Chart {
	c := chart.Chart{
		Title: "scattered blocks over " + transport + ", GB/s, medians", X: "block size", Y: "GB/s",
		XTicks: chart.Powers(func(v float64) string { return size(int(v)) }),
		YTicks: chart.Decades(func(v float64) string { return fmt.Sprintf("%.3g", v) }),
	}
	for i, name := range append([]string{ours}, names(rows)...) {
		l := chart.Line{Name: name, Style: i, Ours: i == 0}
		for _, row := range rows {
			s := &row.Ours
			if o := row.other(name); o != nil {
				s = &o.Series
			} else if name != ours {
				continue
			}
			if s.GBps > 0 {
				l.Points = append(l.Points, chart.Point{X: float64(row.BlockBytes), Y: s.GBps})
			}
		}
		c.Lines = append(c.Lines, l)
	}
	return c
}
