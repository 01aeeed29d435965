package bench

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/bench/child"
)

//go:embed limits/limits.c
var limitsSource []byte

// limits runs the loops that are the ceiling: in C where a compiler is found, else in Go.
type limits struct {
	what   string
	lang   string
	helper *child.Process // nil for the loops in Go
	inGo   *goLimits
}

// helperPatience is how long a program beside the benchmark may take to end.
const helperPatience = 2 * time.Second

// limitVectors is how many blocks a call of the TCP loop carries: a mebibyte's worth gives the loop its best, and the
// kernel takes at most 1,024.
func limitVectors(block int) int { return min(max(1<<20/block, 16), 256) }

func newLimits(ctx context.Context, dir string, region int64, inGo bool) (*limits, error) {
	why := "as asked for"
	if !inGo {
		program, cc := buildLimits(ctx, dir)
		if program != "" {
			h, err := child.Start(ctx, "the C loops", nil, nil, program, strconv.FormatInt(region, 10))
			if err != nil {
				return nil, err
			}
			return &limits{helper: h, lang: "C", what: "C loops of bench/limits/limits.c, built with " + cc + " -O2"}, nil
		}
		why = "no C compiler was found (apt-get install -y gcc libc6-dev)"
	}
	g, err := newGoLimits(region)
	return &limits{inGo: g, lang: "Go", what: "loops in Go: " + why}, err
}

func buildLimits(ctx context.Context, dir string) (program, compiler string) {
	for _, cc := range []string{os.Getenv("CC"), "cc", "gcc", "clang"} {
		if cc == "" {
			continue
		}
		path, err := exec.LookPath(cc)
		if err != nil {
			continue
		}
		source, program := filepath.Join(dir, "limits.c"), filepath.Join(dir, "limits")
		if err := os.WriteFile(source, limitsSource, 0o600); err != nil {
			continue
		}
		if err := exec.CommandContext(ctx, path, "-O2", "-pthread", "-o", program, source).Run(); err == nil {
			return program, path
		}
	}
	return "", ""
}

// run measures one kind: tcp with that many blocks a call, copy and plain with that many threads.
func (l *limits) run(kind string, block int, bytes int64, width int) (m Measure, err error) {
	if l.inGo != nil {
		return l.inGo.run(kind, block, bytes, width)
	}
	err = l.helper.Ask(fmt.Sprintf("%s %d %d %d", kind, block, bytes, width), &m)
	if err == nil && m.Seconds <= 0 {
		err = fmt.Errorf("%s loop took no time", kind)
	}
	return m, err
}

func (l *limits) close() error {
	if l == nil {
		return nil
	}
	_ = l.helper.Stop(helperPatience) // it holds nothing that matters
	return l.inGo.close()
}

// contestants are the loops a transport is held against.
func (l *limits) contestants(transport string, block int, bytes int64) []contestant {
	loop := func(name, what, kind string, width int) contestant {
		return contestant{name: name, what: what, run: func(context.Context) (Measure, error) { return l.run(kind, block, bytes, width) }}
	}
	if transport == "tcp" {
		list := []contestant{loop(loopTCP, l.lang+" loop of writev and readv over the same kind of scattered blocks, one stream, 1 MiB a call"+hostsControl(), "tcp", limitVectors(block))}
		if c := lanesControl(); c != "" {
			list = append(list, loop(loopTCP+" "+c, "the same with our lanes' congestion control", "tcp:"+c, limitVectors(block)))
		}
		return list
	}
	return []contestant{
		loop(loopCopy1, l.lang+" loop copying the same kind of block list, one thread", "copy", 1),
		loop(loopCopy2, "the same, two threads", "copy", 2),
		loop(plain1, l.lang+" memcpy of the whole, one thread", "plain", 1),
		loop(plain2, "the same, two threads", "plain", 2),
	}
}

// lanesControl is the congestion control of our lanes on loopback, "" where the host's own is the same or there is no other:
// what is compared with our lanes must have it too, or the comparison would be one of congestion controls.
func lanesControl() string {
	const lanes = "cubic"
	allowed, _ := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	if hostControl() == lanes || !slices.Contains(strings.Fields(string(allowed)), lanes) {
		return ""
	}
	return lanes
}

// hostControl is the host's own congestion control.
func hostControl() string {
	name, _ := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	return strings.TrimSpace(string(name))
}

func hostsControl() string {
	if name := hostControl(); name != "" {
		return ", the host's congestion control, " + name
	}
	return ""
}

// Names of contestants that verdicts look for.
const (
	ours         = "headrace"
	oursMessages = "headrace, messages"
	loopTCP      = "loop"
	loopCopy1    = "copy x1"
	loopCopy2    = "copy x2"
	plain1       = "plain x1"
	plain2       = "plain x2"
	iperf        = "iperf3"
	iperf1M      = "iperf3 -l 1M"
	mooncake     = "mooncake"
	writeBW      = "ib_write_bw"
	readBW       = "ib_read_bw"
	writeLat     = "ib_write_lat"
	oursSpinning = "headrace, spinning"
	nixl         = "nixl"
)
