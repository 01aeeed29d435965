package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"time"

	"github.com/headrace/headrace/internal/memfd"
	"golang.org/x/sys/unix"
)

// goLimit is limits/limits.c in Go, in one process: blocking system calls, no runtime poller.
func goLimit(kind string, block int, bytes, region int64, vectors int) (Measure, error) {
	src, err := filled(region, 2)
	if err != nil {
		return Measure{}, err
	}
	defer src.Close()
	dst, err := filled(region, 1)
	if err != nil {
		return Measure{}, err
	}
	defer dst.Close()
	n := int(region) / block
	from, to := shuffled(n, 1), shuffled(n, 2)
	count := int(bytes / int64(block))
	if kind == "copy" {
		before, start := ownCPU(), time.Now()
		for k := range count {
			copy(blockOf(dst, to[k%n], block), blockOf(src, from[k%n], block))
		}
		return Measure{Bytes: int64(count) * int64(block), Seconds: time.Since(start).Seconds(), CPUSeconds: ownCPU() - before}, nil
	}
	a, b, err := tcpPair()
	if err != nil {
		return Measure{}, err
	}
	defer a.Close()
	defer b.Close()
	before, start := ownCPU(), time.Now()
	sent := make(chan error, 1)
	go func() { sent <- stream(int(a.Fd()), src, from, block, count, vectors, unix.Writev) }()
	err = stream(int(b.Fd()), dst, to, block, count, vectors, unix.Readv)
	if err != nil {
		_ = unix.Shutdown(int(a.Fd()), unix.SHUT_RDWR)
	}
	m := Measure{Bytes: int64(count) * int64(block), Seconds: time.Since(start).Seconds()}
	err = errors.Join(err, <-sent)
	m.CPUSeconds = ownCPU() - before
	return m, err
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
	b := m.Bytes()
	for i := range b {
		b[i] = v
	}
	return m, nil
}

func shuffled(n int, seed uint64) []uint32 {
	v := make([]uint32, n)
	for i := range v {
		v[i] = uint32(i)
	}
	rand.New(rand.NewPCG(seed, 0)).Shuffle(n, func(i, j int) { v[i], v[j] = v[j], v[i] })
	return v
}

func ownCPU() float64 {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
