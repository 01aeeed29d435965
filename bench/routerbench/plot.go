package routerbench

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/headrace/headrace/bench/chart"
)

// styles gives each name its own in every chart.
var styles = map[string]int{ours: 0, oursPairs: 0, oursNixl: 8, direct: 6, nginx: 1, haproxy: 2, sglang: 3, sglangPair: 3, sglangBare: 4}

// SVG draws what there is of rates by body size, and of added p99 at half the peak: a chart for each part and kind.
func SVG(w io.Writer, r *Report) error {
	var charts []chart.Chart
	for _, part := range []string{partWhole, partPairs, partOpen} {
		for _, kind := range []string{kindJSON, kindStream} {
			if c := chartOf(r, part, kind); len(c.Lines) > 0 {
				charts = append(charts, c)
			}
		}
	}
	if len(charts) == 0 {
		return errors.New("draw: nothing was measured")
	}
	return chart.SVG(w, charts)
}

// chartOf shows one kind of one part, at its most connections. It has no lines when that was not measured.
func chartOf(r *Report, part, kind string) chart.Chart {
	conns := 0
	for i := range r.Rows {
		if w := &r.Rows[i]; w.Part == part && w.Kind == kind {
			conns = max(conns, w.Connections)
		}
	}
	c := chart.Chart{
		Title: fmt.Sprintf("%s, %s, %d connections", part, kind, conns), X: "body, bytes", Y: "requests a second",
		XTicks: chart.Decades(label), YTicks: chart.Decades(label),
	}
	if part == partOpen {
		c.Y = "added p99 at half the peak, us"
	}
	for i := range r.Rows {
		w := &r.Rows[i]
		if w.Part != part || w.Kind != kind || w.Connections != conns {
			continue
		}
		for _, x := range w.All {
			at := chart.Point{X: float64(w.BodyBytes), Y: x.RPS}
			if part == partOpen {
				if x.Name == direct {
					continue
				}
				at.Y = max(x.AddedP99, 1)
			}
			k := slices.IndexFunc(c.Lines, func(l chart.Line) bool { return l.Name == x.Name })
			if k < 0 {
				k = len(c.Lines)
				c.Lines = append(c.Lines, chart.Line{Name: x.Name, Style: styles[x.Name], Ours: x.Name == ours || x.Name == oursPairs})
			}
			c.Lines[k].Points = append(c.Lines[k].Points, at)
		}
	}
	return c
}

// label is a number in few letters.
func label(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%.0fM", v/1e6)
	case v >= 1e3:
		return fmt.Sprintf("%.0fk", v/1e3)
	}
	return fmt.Sprintf("%.0f", v)
}
