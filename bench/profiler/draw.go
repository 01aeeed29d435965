package profiler

import (
	"bytes"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/headrace/headrace/bench/chart"
	"github.com/headrace/headrace/scheduler/profile"
)

// SVG draws what was measured: the time to the first token by length of the prompt, with nothing cached, and for each degree the time between
// tokens by streams.
func SVG(w io.Writer, r *profile.Report) error {
	charts := []chart.Chart{{Title: r.Name + ": prefill, nothing cached", X: "prompt, tokens", Y: "time to the first token, ms"}}
	for i := range r.Measured {
		m := &r.Measured[i]
		first := chart.Line{Name: fmt.Sprintf("degree %d", m.Degree), Style: i, Ours: m.Degree == r.Choice.Prefill.Degree}
		streams := chart.Chart{Title: fmt.Sprintf("%s: decode, degree %d", r.Name, m.Degree), X: "streams", Y: "time between tokens, ms"}
		for _, p := range r.Points {
			switch {
			case p.Degree != m.Degree || p.Why != "" || !(p.Ms > 0):
			case p.Kind == profile.Prefill && p.Cached == 0:
				first.Points = append(first.Points, chart.Point{X: float64(p.Prompt), Y: p.Ms})
			case p.Kind == profile.Decode:
				name := fmt.Sprintf("%d tokens", p.Context)
				k := slices.IndexFunc(streams.Lines, func(l chart.Line) bool { return l.Name == name })
				if k < 0 {
					k = len(streams.Lines)
					streams.Lines = append(streams.Lines, chart.Line{Name: name, Style: k})
				}
				streams.Lines[k].Points = append(streams.Lines[k].Points, chart.Point{X: float64(p.Streams), Y: p.Ms})
			}
		}
		if len(first.Points) > 0 {
			charts[0].Lines = append(charts[0].Lines, first)
		}
		if len(streams.Lines) > 0 {
			charts = append(charts, streams)
		}
	}
	if len(charts[0].Lines) == 0 {
		charts = charts[1:]
	}
	for i := range charts {
		charts[i].XTicks, charts[i].YTicks = chart.Decades(number), chart.Decades(number)
	}
	return chart.SVG(w, charts)
}

func number(v float64) string { return fmt.Sprintf("%.4g", v) }

// page is one file that needs nothing beside it.
var page = template.Must(template.New("report").Parse(`<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{{.R.Name}}</title>
<style>body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em}table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #bbb;padding:.2em .6em;text-align:right}pre{background:#f3f3f3;padding:1em;overflow:auto}.x{color:#777}</style>
<h1>{{.R.Name}}</h1>
{{with .R.Note}}<p>{{.}}</p>{{end}}
{{if .R.Partial}}<p><b>Not complete.</b></p>{{end}}
<pre>{{.Text}}</pre>
{{.Charts}}
<h2>Decode surface</h2>
<p class="x">Time between tokens in ms, by the part of the KV cache that is in use and by context. Grey: outside of what was measured.</p>
{{range .Grids}}<h3>degree {{.Degree}}</h3><table><tr><th></th>{{range .Contexts}}<th>{{.}}</th>{{end}}</tr>
{{range .Rows}}<tr><th>{{.Usage}}</th>{{range .Cells}}<td{{if .Extrapolated}} class="x"{{end}}>{{printf "%.4g" .ITL}}</td>{{end}}</tr>
{{end}}</table>{{end}}
<h2>Points</h2>
<table><tr><th>degree</th><th>what</th><th>ms</th><th>least</th><th>most</th><th>rounds</th></tr>
{{range .R.Points}}<tr><td>{{.Degree}}</td><td>{{.String}}</td>{{if .Why}}<td colspan="4">{{.Why}}</td>{{else}}<td>{{printf "%.4g" .Ms}}</td><td>{{printf "%.4g" .Low}}</td><td>{{printf "%.4g" .High}}</td><td>{{.Rounds}}</td>{{end}}</tr>
{{end}}</table>
</html>
`))

type cell struct {
	ITL          float64
	Extrapolated bool
}

type row struct {
	Usage string
	Cells []cell
}

type grid struct {
	Degree   int
	Contexts []int
	Rows     []row
}

// HTML is the report for people.
func HTML(w io.Writer, r *profile.Report) error {
	var text, svg bytes.Buffer
	if err := Print(&text, "", r, false); err != nil {
		return err
	}
	if err := SVG(&svg, r); err != nil {
		return err
	}
	drawn := svg.String()
	drawn = drawn[max(strings.Index(drawn, "<svg"), 0):] // without the prolog of a file of its own
	var grids []grid
	for i := range r.Measured {
		if m := &r.Measured[i]; m.Surfaces != nil {
			grids = append(grids, gridOf(m))
		}
	}
	return page.Execute(w, map[string]any{"R": r, "Text": text.String(), "Charts": template.HTML(drawn), "Grids": grids})
}

func gridOf(m *profile.Measured) grid {
	g := grid{Degree: m.Degree}
	last := -1.0
	for _, p := range m.Surfaces.Decode {
		if !slices.Contains(g.Contexts, p.Context) {
			g.Contexts = append(g.Contexts, p.Context)
		}
		if p.KVUsage != last {
			last = p.KVUsage
			g.Rows = append(g.Rows, row{Usage: fmt.Sprintf("%.0f %%", 100*p.KVUsage)})
		}
		cells := &g.Rows[len(g.Rows)-1].Cells
		*cells = append(*cells, cell{p.ITL, p.Extrapolated})
	}
	return g
}
