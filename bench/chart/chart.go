// Package chart draws measured lines over logarithmic axes, and other plots below each other, as SVG. It must not know what they
// are of.
package chart

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
	"gonum.org/v1/plot/vg/vgsvg"
)

// Size of one chart, and what is left free around it.
const (
	width  = 16 * vg.Centimeter
	height = 11 * vg.Centimeter
	margin = vg.Centimeter / 4
)

// styles are told apart by shade and by shape, for who sees no colours.
var styles = []draw.GlyphStyle{
	{Color: color.RGBA{R: 0xd5, G: 0x5e, A: 0xff}, Shape: draw.CircleGlyph{}},
	{Color: color.RGBA{G: 0x72, B: 0xb2, A: 0xff}, Shape: draw.SquareGlyph{}},
	{Color: color.RGBA{G: 0x9e, B: 0x73, A: 0xff}, Shape: draw.TriangleGlyph{}},
	{Color: color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}, Shape: draw.PyramidGlyph{}},
	{Color: color.RGBA{R: 0xe6, G: 0x9f, A: 0xff}, Shape: draw.CrossGlyph{}},
	{Color: color.RGBA{R: 0x56, G: 0xb4, B: 0xe9, A: 0xff}, Shape: draw.RingGlyph{}},
	{Color: color.RGBA{R: 0x55, G: 0x55, B: 0x55, A: 0xff}, Shape: draw.BoxGlyph{}},
	{Color: color.RGBA{R: 0x8c, G: 0x6b, B: 0x3f, A: 0xff}, Shape: draw.PlusGlyph{}},
	{Color: color.RGBA{R: 0x66, G: 0x33, B: 0x99, A: 0xff}, Shape: draw.SquareGlyph{}},
}

// Chart is lines between the same axes. Both are logarithmic.
type Chart struct {
	Title          string
	X, Y           string // what is along the axes, with the unit
	XTicks, YTicks Ticks
	Lines          []Line
}

// Line is one line. There must be a point in it, and none may have a 0.
type Line struct {
	Name   string
	Points []Point
	Style  int  // the colour and the shape of its points; there are nine
	Ours   bool // drawn thick
}

// Point is a point of a line.
type Point struct{ X, Y float64 }

// Ticks are an axis's, between two values.
type Ticks func(low, high float64) []plot.Tick

// Powers are the powers of two, every second one with its name.
func Powers(label func(v float64) string) Ticks {
	return func(low, high float64) []plot.Tick {
		var list []plot.Tick
		for e := math.Ceil(math.Log2(low)); e <= math.Log2(high); e++ {
			tick := plot.Tick{Value: math.Exp2(e)}
			if int(e)%2 == 0 {
				tick.Label = label(tick.Value)
			}
			list = append(list, tick)
		}
		return list
	}
}

// Decades are 1, 2 and 5 times the powers of ten.
func Decades(label func(v float64) string) Ticks {
	return func(low, high float64) []plot.Tick {
		var list []plot.Tick
		for e := math.Floor(math.Log10(low)); e <= math.Log10(high); e++ {
			for _, m := range []float64{1, 2, 5} {
				if v := m * math.Pow(10, e); v >= low && v <= high {
					list = append(list, plot.Tick{Value: v, Label: label(v)})
				}
			}
		}
		return list
	}
}

// SVG draws charts below each other..
func SVG(w io.Writer, charts []Chart) error {
	if len(charts) == 0 {
		return errors.New("draw: there is no chart")
	}
	var plots []*plot.Plot
	for i := range charts {
		p, err := charts[i].plot()
		if err != nil {
			return fmt.Errorf("draw %s: %w", charts[i].Title, err)
		}
		plots = append(plots, p)
	}
	return Stack(w, width, height, plots...)
}

// Stack draws plots below each other, each of that size.
func Stack(w io.Writer, width, height vg.Length, plots ...*plot.Plot) error {
	canvas := vgsvg.New(width, height*vg.Length(len(plots)))
	all := draw.New(canvas)
	for i, p := range plots {
		low := height * vg.Length(len(plots)-1-i)
		p.Draw(draw.Crop(all, margin, -margin, low+margin, low+height-all.Max.Y-margin))
	}
	_, err := canvas.WriteTo(w)
	return err
}

func (c *Chart) plot() (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = c.Title, c.X, c.Y
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(c.XTicks), plot.TickerFunc(c.YTicks)
	p.Legend.Top, p.Legend.Left = false, false
	p.Add(plotter.NewGrid())
	for _, l := range c.Lines {
		points := make(plotter.XYs, len(l.Points))
		for i, at := range l.Points {
			points[i] = plotter.XY(at)
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", l.Name, err)
		}
		dots.GlyphStyle = styles[l.Style%len(styles)]
		dots.Radius = vg.Points(3)
		line.Color, line.Width = dots.Color, vg.Points(1)
		if l.Ours {
			line.Width = vg.Points(2.5)
		}
		p.Add(line, dots)
		p.Legend.Add(l.Name, line, dots)
	}
	// A logarithmic axis needs an extent, also with a single point, and the legend a place beside the lines.
	p.X.Min, p.X.Max = p.X.Min/1.5, p.X.Max*max(2, math.Sqrt(p.X.Max/p.X.Min))
	p.Y.Min, p.Y.Max = p.Y.Min/1.5, p.Y.Max*1.5
	return p, nil
}
