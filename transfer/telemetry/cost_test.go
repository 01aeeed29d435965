package telemetry

import (
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
)

// BenchmarkCost is what measuring takes of a lane's throughput over loopback: rounds without, by TCP_INFO and by eBPF take
// turns in one run, and the medians are compared. Status is asked for ten times a round, as several scrapers would.
func BenchmarkCost(b *testing.B) {
	modes := []Mode{Off, Kernel, EBPF}
	rates, costs := make(map[Mode][]float64), make(map[Mode][]float64)
	for round := 0; b.Loop(); round++ {
		for i := range modes { // none is always first
			m := modes[(i+round)%len(modes)]
			before := processorTime(b)
			rates[m] = append(rates[m], streamRate(b, m))
			costs[m] = append(costs[m], processorTime(b)-before)
		}
	}
	median := func(v []float64) float64 {
		slices.Sort(v)
		return v[len(v)/2]
	}
	b.ReportMetric(median(rates[Off])/1e6, "MB/s-off")
	for _, m := range modes[1:] {
		b.ReportMetric(median(rates[m])/median(rates[Off]), string(m)+"/off-rate")
		b.ReportMetric(median(costs[m])/median(costs[Off]), string(m)+"/off-cpu")
	}
}

// processorTime is what this process, both ends of the stream, has used.
func processorTime(b *testing.B) float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

func streamRate(b *testing.B, mode Mode) float64 {
	const block, blocks, looks = 64 << 10, 8192, 10
	tel, err := New(Config{Mode: mode})
	if err != nil {
		b.Skip(err)
	}
	defer tel.Close()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	tel.Listening(l)
	near, err := tel.Dial(b.Context(), l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer near.Close()
	far, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	defer far.Close()
	g := tel.Channel()
	defer g.Close()
	if mode != Off {
		for _, c := range []net.Conn{near, far} {
			raw, err := c.(*net.TCPConn).SyscallConn()
			if err != nil {
				b.Fatal(err)
			}
			defer g.Lane(transfer.Flow{Transport: "tcp", Socket: raw})()
		}
	}
	got := make(chan error, 1)
	go func() {
		_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{io.LimitReader(far, block*blocks)}, make([]byte, 256<<10))
		got <- err
	}()
	buf := make([]byte, block)
	began := time.Now()
	for i := range blocks {
		if _, err := near.Write(buf); err != nil {
			b.Fatal(err)
		}
		if i%(blocks/looks) == 0 {
			g.Wire()
		}
	}
	if err := <-got; err != nil {
		b.Fatal(err)
	}
	return block * blocks / time.Since(began).Seconds()
}
