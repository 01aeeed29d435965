package bench

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestSVG(t *testing.T) {
	r := &Report{}
	if err := SVG(io.Discard, r); err == nil {
		t.Error("a chart of nothing was drawn")
	}
	series := func(g float64) Series { return Series{GBps: g} }
	r.Rows = []Row{
		{Part: partSizes, Transport: "tcp", BlockBytes: 4 * kib, Ours: series(1), Others: []Other{{Name: nixl, Series: series(0.1)}}},
		{Part: partSizes, Transport: "tcp", BlockBytes: 4 * mib, Ours: series(3), Others: []Other{{Name: loopTCP, Series: series(4)}}},
		{Part: partSizes, Transport: "shm", BlockBytes: 64 * kib, Ours: series(10)},
	}
	var out bytes.Buffer
	if err := SVG(&out, r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"over tcp", "over shm", "nixl", "loop", "64 KiB", "4 MiB"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in the chart", want)
		}
	}
	d := xml.NewDecoder(&out)
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}
