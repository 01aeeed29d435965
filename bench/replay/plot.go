package replay

import (
	"errors"
	"fmt"
	"image/color"
	"io"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/headrace/headrace/bench/chart"
	"github.com/headrace/headrace/scheduler/sim"
)

const (
	chartWidth  = 18 * vg.Centimeter
	chartHeight = 9 * vg.Centimeter
)

// looks tell planners apart by colour, shape and dashes.
var looks = []struct {
	color  color.RGBA
	shape  draw.GlyphDrawer
	dashes []vg.Length
}{
	{color.RGBA{R: 0xd5, G: 0x5e, A: 0xff}, draw.CircleGlyph{}, nil},
	{color.RGBA{G: 0x72, B: 0xb2, A: 0xff}, draw.SquareGlyph{}, []vg.Length{6, 2}},
	{color.RGBA{G: 0x9e, B: 0x73, A: 0xff}, draw.TriangleGlyph{}, []vg.Length{2, 2}},
	{color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}, draw.PyramidGlyph{}, []vg.Length{8, 2, 2, 2}},
	{color.RGBA{R: 0x55, G: 0x55, B: 0x55, A: 0xff}, draw.CrossGlyph{}, []vg.Length{1, 3}},
	{color.RGBA{R: 0xe6, G: 0x9f, A: 0xff}, draw.BoxGlyph{}, []vg.Length{10, 4}},
	{color.RGBA{R: 0x66, G: 0x33, B: 0x99, A: 0xff}, draw.RingGlyph{}, []vg.Length{4, 4}},
}

// SVG draws good requests per GPU-second beside the good share, and the GPUs taken and the share of good requests over time.
func SVG(w io.Writer, r *Report) error {
	if len(r.Rows) == 0 {
		return errors.New("draw: no planner was run")
	}
	front, err := front(r)
	if err != nil {
		return fmt.Errorf("draw planners: %w", err)
	}
	taken, err := overTime(r, "GPUs", func(p []sim.Point, i int) float64 { return float64(p[i].GPUs) })
	if err != nil {
		return fmt.Errorf("draw GPUs: %w", err)
	}
	good, err := overTime(r, "good requests, % of those that ended in the minute", goodShare)
	if err != nil {
		return fmt.Errorf("draw good share: %w", err)
	}
	return chart.Stack(w, chartWidth, chartHeight, front, taken, good)
}

func front(r *Report) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("%s at %gx, engines %q", r.Trace, r.Rate, r.Table)
	p.X.Label.Text, p.Y.Label.Text = "good requests, %", "good requests per GPU-second"
	p.Add(plotter.NewGrid())
	p.Legend.Left = true
	for i := range r.Rows {
		x := &r.Rows[i]
		dots, err := plotter.NewScatter(plotter.XYs{{X: 100 * x.GoodShare, Y: x.GoodPerGPUSecond}})
		if err != nil {
			return nil, err
		}
		look := looks[i%len(looks)]
		dots.Color, dots.Shape, dots.Radius = look.color, look.shape, vg.Points(4)
		p.Add(dots)
		p.Legend.Add(x.Planner, dots)
	}
	p.X.Min, p.X.Max, p.Y.Min = max(0, p.X.Min-2), min(100, p.X.Max+2), 0
	p.Y.Max = math.Max(p.Y.Max*1.1, 1e-3)
	return p, nil
}

func overTime(r *Report, label string, value func([]sim.Point, int) float64) (*plot.Plot, error) {
	p := plot.New()
	p.X.Label.Text, p.Y.Label.Text = "seconds", label
	p.Add(plotter.NewGrid())
	for i := range r.Rows {
		var points plotter.XYs
		for k := range r.Rows[i].Points {
			if v := value(r.Rows[i].Points, k); !math.IsNaN(v) {
				points = append(points, plotter.XY{X: r.Rows[i].Points[k].At.Seconds(), Y: v})
			}
		}
		if len(points) == 0 {
			continue
		}
		line, err := plotter.NewLine(points)
		if err != nil {
			return nil, err
		}
		look := looks[i%len(looks)]
		line.Color, line.Dashes, line.Width = look.color, look.dashes, vg.Points(1.2)
		p.Add(line)
	}
	p.Y.Min = 0
	return p, nil
}

// goodShare is that of the minute before a point.
func goodShare(points []sim.Point, i int) float64 {
	good, ended := 0, 0
	for k := i; k >= 0 && points[i].At.Seconds()-points[k].At.Seconds() < 60; k-- {
		good += points[k].Good
		ended += points[k].Ended
	}
	if ended == 0 {
		return math.NaN()
	}
	return 100 * float64(good) / float64(ended)
}
