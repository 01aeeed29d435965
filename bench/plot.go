package bench

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

// Size of one transport's chart.
const (
	chartWidth  = 16 * vg.Centimeter
	chartHeight = 11 * vg.Centimeter
)

// styles are told apart by shade and by shape, for who sees no colours. Ours comes first.
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

// SVG draws GB/s by block size, one chart a transport.
func SVG(w io.Writer, r *Report) error {
	var charts []*plot.Plot
	for _, t := range []string{"tcp", "shm"} {
		if rows := r.rows(partSizes, t); len(rows) > 0 {
			p, err := chart(rows, t)
			if err != nil {
				return fmt.Errorf("draw %s: %w", t, err)
			}
			charts = append(charts, p)
		}
	}
	if len(charts) == 0 {
		return errors.New("draw: rates by block size were not measured (--part sizes)")
	}
	canvas := vgsvg.New(chartWidth, chartHeight*vg.Length(len(charts)))
	all := draw.New(canvas)
	for i, p := range charts {
		top := chartHeight * vg.Length(len(charts)-1-i)
		p.Draw(draw.Crop(all, vg.Centimeter/4, -vg.Centimeter/4, top+vg.Centimeter/4, top+chartHeight-all.Max.Y-vg.Centimeter/4))
	}
	_, err := canvas.WriteTo(w)
	return err
}

func chart(rows []*Row, transport string) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = "scattered blocks over " + transport + ", GB/s, medians"
	p.X.Label.Text, p.Y.Label.Text = "block size", "GB/s"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(sizeTicks), plot.TickerFunc(rateTicks)
	p.Legend.Top, p.Legend.Left = false, false
	p.Add(plotter.NewGrid())
	for i, name := range append([]string{ours}, names(rows)...) {
		var points plotter.XYs
		for _, row := range rows {
			s := &row.Ours
			if o := row.other(name); o != nil {
				s = &o.Series
			} else if name != ours {
				continue
			}
			if s.GBps > 0 {
				points = append(points, plotter.XY{X: float64(row.BlockBytes), Y: s.GBps})
			}
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		dots.GlyphStyle = styles[i%len(styles)]
		dots.Radius = vg.Points(3)
		line.Color, line.Width = dots.Color, vg.Points(1)
		if i == 0 {
			line.Width = vg.Points(2.5)
		}
		p.Add(line, dots)
		p.Legend.Add(name, line, dots)
	}
	// A logarithmic axis needs an extent, also with a single point, and the legend a place beside the lines.
	p.X.Min, p.X.Max = p.X.Min/1.5, p.X.Max*max(2, math.Sqrt(p.X.Max/p.X.Min))
	p.Y.Min, p.Y.Max = p.Y.Min/1.5, p.Y.Max*1.5
	return p, nil
}

// sizeTicks are the powers of two, every second one with its name.
func sizeTicks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for e := math.Ceil(math.Log2(low)); e <= math.Log2(high); e++ {
		tick := plot.Tick{Value: math.Exp2(e)}
		if int(e)%2 == 0 {
			tick.Label = size(int(tick.Value))
		}
		ticks = append(ticks, tick)
	}
	return ticks
}

// rateTicks are 1, 2 and 5 times the powers of ten.
func rateTicks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for e := math.Floor(math.Log10(low)); e <= math.Log10(high); e++ {
		for _, m := range []float64{1, 2, 5} {
			if v := m * math.Pow(10, e); v >= low && v <= high {
				ticks = append(ticks, plot.Tick{Value: v, Label: fmt.Sprintf("%.3g", v)})
			}
		}
	}
	return ticks
}
