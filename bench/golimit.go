package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/memfd"
	"golang.org/x/sys/unix"
)

// goLimits is limits/limits.c in Go, in one process: blocking system calls, no runtime poller.
type goLimits struct{ src, dst *memfd.Memory }

func newGoLimits(region int64) (*goLimits, error) {
	src, err := filled(region, 2)
	if err != nil {
		return nil, err
	}
	dst, err := filled(region, 1)
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	return &goLimits{src: src, dst: dst}, nil
}

func (g *goLimits) close() error {
	if g == nil {
		return nil
	}
	return errors.Join(g.src.Close(), g.dst.Close())
}

func (g *goLimits) run(kind string, block int, bytes int64, width int) (Measure, error) {
	if kind == "plain" {
		return g.plain(bytes, width), nil
	}
	n := int(g.src.Size()) / block
	from, to := shuffled(n, 1), shuffled(n, 2)
	count := int(bytes / int64(block))
	if kind == "copy" {
		return timed(int64(count)*int64(block), width, func(part int) {
			for k := part; k < count; k += width {
				copy(blockOf(g.dst, to[k%n], block), blockOf(g.src, from[k%n], block))
			}
		}), nil
	}
	a, b, err := tcpPair()
	if err != nil {
		return Measure{}, err
	}
	defer a.Close()
	defer b.Close()
	if _, name, named := strings.Cut(kind, ":"); named {
		if err := unix.SetsockoptString(int(a.Fd()), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name); err != nil {
			return Measure{}, fmt.Errorf("congestion control %s: %w", name, err)
		}
	}
	before, start := ownCPU(), time.Now()
	sent := make(chan error, 1)
	go func() { sent <- stream(int(a.Fd()), g.src, from, block, count, width, unix.Writev) }()
	err = stream(int(b.Fd()), g.dst, to, block, count, width, unix.Readv)
	if err != nil {
		_ = unix.Shutdown(int(a.Fd()), unix.SHUT_RDWR)
	}
	m := Measure{Bytes: int64(count) * int64(block), Seconds: time.Since(start).Seconds()}
	err = errors.Join(err, <-sent)
	m.CPUSeconds = ownCPU() - before
	return m, err
}

func (g *goLimits) plain(bytes int64, width int) Measure {
	passes, share := int(bytes)/len(g.src.Bytes()), len(g.src.Bytes())/width
	return timed(int64(passes)*int64(g.src.Size()), width, func(part int) {
		for range passes {
			copy(g.dst.Bytes()[part*share:(part+1)*share], g.src.Bytes()[part*share:])
		}
	})
}

// timed runs a part of the work on each of some goroutines.
func timed(bytes int64, width int, work func(part int)) Measure {
	before, start := ownCPU(), time.Now()
	var wg sync.WaitGroup
	for part := range width {
		wg.Go(func() { work(part) })
	}
	wg.Wait()
	return Measure{Bytes: bytes, Seconds: time.Since(start).Seconds(), CPUSeconds: ownCPU() - before}
}

func stream(fd int, m *memfd.Memory, order []uint32, block, count, vectors int, move func(int, [][]byte) (int, error)) error {
	for k := 0; k < count; {
		io := make([][]byte, 0, vectors)
		for ; len(io) < vectors && k < count; k++ {
			io = append(io, blockOf(m, order[k%len(order)], block))
		}
		for len(io) > 0 {
			got, err := move(fd, io)
			if err == unix.EINTR {
				continue
			}
			if err != nil || got == 0 {
				return fmt.Errorf("move after %d blocks: %w", k, err)
			}
			for len(io) > 0 && got >= len(io[0]) {
				got -= len(io[0])
				io = io[1:]
			}
			if len(io) > 0 {
				io[0] = io[0][got:]
			}
		}
	}
	return nil
}

// tcpPair gives the two ends of a loopback connection as blocking descriptors.
func tcpPair() (a, b *os.File, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	file := func(c net.Conn, err error) (*os.File, error) {
		if err != nil {
			return nil, err
		}
		defer c.Close()
		f, err := c.(*net.TCPConn).File()
		if err != nil {
			return nil, err
		}
		return f, unix.SetNonblock(int(f.Fd()), false)
	}
	if a, err = file(net.Dial("tcp", l.Addr().String())); err != nil {
		return nil, nil, err
	}
	if b, err = file(l.Accept()); err != nil {
		return nil, nil, errors.Join(err, a.Close())
	}
	return a, b, nil
}

func blockOf(m *memfd.Memory, i uint32, size int) []byte {
	at := int(i) * size
	return m.Bytes()[at : at+size]
}

// filled makes memory whose pages are all there.
func filled(size int64, v byte) (*memfd.Memory, error) {
	m, err := memfd.Create("headrace-bench", uint64(size))
	if err != nil {
		return nil, err
	}
	refill(m, v)
	return m, nil
}

// refill writes v everywhere, by ever longer copies.
func refill(m *memfd.Memory, v byte) { refillBytes(m.Bytes(), v) }

func refillBytes(b []byte, v byte) {
	b[0] = v
	for n := 1; n < len(b); {
		n += copy(b[n:], b[:min(n, 1<<20)])
	}
}

func shuffled(n int, seed uint64) []uint32 {
	v := make([]uint32, n)
	for i := range v {
		v[i] = uint32(i)
	}
	rand.New(rand.NewPCG(seed, 0)).Shuffle(n, func(i, j int) { v[i], v[j] = v[j], v[i] })
	return v
}

// ownCPU is what this process has used, in seconds.
func ownCPU() float64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t)
	return float64(t.Nano()) / 1e9
}

// processCPU is what another process has used: its CPU clock, see clock_getcpuclockid(3).
func processCPU(pid int) float64 {
	const sched = 2
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &t); err != nil {
		return 0
	}
	return float64(t.Nano()) / 1e9
}
