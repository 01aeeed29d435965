package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/bench/child"
	"github.com/headrace/headrace/transfer"
)

// perftestMissing says how to have it.
const perftestMissing = "ib_write_bw: not measured, it is not installed; run: apt-get install -y perftest"

// perftest runs the programs of linux-rdma/perftest, which RDMA devices are measured with: a server and a client on the
// same port of this host, as our two daemons are.
type perftest struct {
	port transfer.PortStatus
}

func newPerftest(p transfer.PortStatus) (*perftest, error) {
	for _, name := range []string{writeBW, readBW, writeLat} {
		if _, err := exec.LookPath(name); err != nil {
			return nil, errors.New(perftestMissing)
		}
	}
	return &perftest{port: p}, nil
}

// perftestTimeout bounds one run: what takes longer hangs. One that ends without a rate is tried again.
const (
	perftestTimeout = time.Minute
	perftestTries   = 3
)

// run runs one of the programs at both ends and gives what the client says.
func (p *perftest) run(ctx context.Context, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, perftestTimeout)
	defer cancel()
	tcp, err := freePort()
	if err != nil {
		return "", err
	}
	args = append([]string{"-d", p.port.Device, "-i", strconv.Itoa(p.port.Port), "-x", strconv.Itoa(p.port.GIDIndex), "-F", "-p", strconv.Itoa(tcp)}, args...)
	server := child.OwnGroup(exec.CommandContext(ctx, name, args...))
	said := &child.Tail{}
	server.Stdout, server.Stderr = said, said
	if err := server.Start(); err != nil {
		return "", fmt.Errorf("start %s: %w", name, err)
	}
	defer func() {
		_ = server.Cancel()
		_ = server.Wait()
	}()
	if err := awaitListener(ctx, tcp); err != nil {
		return "", fmt.Errorf("%s: %w%s", name, err, said.Quoted())
	}
	out, err := child.OwnGroup(exec.CommandContext(ctx, name, append(args, "127.0.0.1")...)).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("run %s %s: %w (it said %q)", name, strings.Join(args, " "), err, child.LastLine(string(out)))
	}
	if err := server.Wait(); err != nil {
		return "", fmt.Errorf("the server of %s: %w%s", name, err, said.Quoted())
	}
	return string(out), nil
}

// bandwidth moves bytes in messages of that size.
func (p *perftest) bandwidth(ctx context.Context, name string, size int, bytes int64, pairs int) (Measure, error) {
	n := max(bytes/int64(size)/int64(pairs), 16)
	var rate float64
	for try := 1; rate == 0; try++ {
		out, err := p.run(ctx, name, "-s", strconv.Itoa(size), "-n", strconv.FormatInt(n, 10), "-q", strconv.Itoa(pairs))
		if err != nil {
			return Measure{}, err
		}
		// Now and then it takes the clock's frequency for another, and says that nothing moved.
		if rate, err = parseBandwidth(out, size); err != nil && try == perftestTries {
			return Measure{}, fmt.Errorf("read what %s says, %d times: %w", name, try, err)
		}
	}
	m := Measure{Bytes: n * int64(size) * int64(pairs)}
	m.Seconds = float64(m.Bytes) / rate
	return m, nil
}

// parseBandwidth finds the average, which perftest gives in MiB a second, and gives bytes a second.
func parseBandwidth(out string, size int) (float64, error) {
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 5 || f[0] != strconv.Itoa(size) {
			continue
		}
		rate, err := strconv.ParseFloat(f[3], 64)
		if err != nil || !(rate > 0) || math.IsInf(rate, 0) {
			return 0, fmt.Errorf("average %q", f[3])
		}
		return rate * mib, nil
	}
	return 0, fmt.Errorf("no line about messages of %d bytes in %q", size, child.LastLine(out))
}

// latency gives the times of single messages in microseconds: half of a round trip each.
func (p *perftest) latency(ctx context.Context, size, count int) ([]float64, error) {
	for try := 1; ; try++ {
		out, err := p.run(ctx, writeLat, "-s", strconv.Itoa(size), "-n", strconv.Itoa(count), "-U")
		if err != nil {
			return nil, err
		}
		took, err := parseLatency(out)
		if err == nil {
			return took, nil
		}
		if try == perftestTries {
			return nil, fmt.Errorf("read what %s says, %d times: %w", writeLat, try, err)
		}
	}
}

// parseLatency takes the unsorted results: lines of a number and a time.
func parseLatency(out string) (took []float64, err error) {
	for line := range strings.Lines(out) {
		number, rest, ok := strings.Cut(strings.TrimSpace(line), ",")
		if _, err := strconv.Atoi(number); !ok || err != nil {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
		if err != nil || !(v > 0) || math.IsInf(v, 0) { // it took the clock's frequency for another
			return nil, fmt.Errorf("line %q", line)
		}
		took = append(took, v)
	}
	if len(took) == 0 {
		return nil, fmt.Errorf("no samples in %q", child.LastLine(out))
	}
	return took, nil
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// awaitListener waits until somebody listens on a port, without connecting: perftest takes whoever comes for its client.
func awaitListener(ctx context.Context, port int) error {
	want := fmt.Sprintf(":%04X", port)
	for {
		for _, file := range []string{"tcp", "tcp6"} {
			b, err := os.ReadFile(filepath.Join("/proc/net", file))
			if err != nil {
				continue
			}
			for line := range strings.Lines(string(b)) {
				const listening = "0A"
				if f := strings.Fields(line); len(f) > 3 && strings.HasSuffix(f[1], want) && f[3] == listening {
					return nil
				}
			}
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("wait for it to listen on port %d: %w", port, context.Cause(ctx))
		}
	}
}

// contestants of one block size: with one queue pair, and writes also with as many as our channel has lanes.
func (p *perftest) contestants(block int, bytes int64, lanes int) (list []contestant) {
	if p == nil {
		return nil
	}
	add := func(name string, pairs int, what string) {
		list = append(list, contestant{name: withPairs(name, pairs), what: what, run: func(ctx context.Context) (Measure, error) { return p.bandwidth(ctx, name, block, bytes, pairs) }})
	}
	defaults := fmt.Sprintf("perftest on %s, its defaults: one queue pair, 128 messages under way, completions polled without rest, one buffer at each end", portName(&p.port))
	add(writeBW, 1, defaults)
	add(readBW, 1, defaults)
	if lanes > 1 {
		add(writeBW, lanes, "the same with as many queue pairs as our channel has lanes")
	}
	return list
}

func withPairs(name string, pairs int) string {
	if pairs == 1 {
		return name
	}
	return fmt.Sprintf("%s -q %d", name, pairs)
}
