package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/bench/child"
)

// iperfMissing says how to have it.
const iperfMissing = "iperf3: not measured, it is not installed; run: apt-get install -y iperf3"

// iperfServer is iperf3's other side, which stays for all runs.
type iperfServer struct {
	cmd    *exec.Cmd
	stdout io.Closer
	port   string
}

func startIperf(ctx context.Context) (*iperfServer, error) {
	if _, err := exec.LookPath("iperf3"); err != nil {
		return nil, errors.New(iperfMissing)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &iperfServer{port: strconv.Itoa(l.Addr().(*net.TCPAddr).Port)}
	_ = l.Close()
	s.cmd = child.OwnGroup(exec.CommandContext(ctx, "iperf3", "-s", "-B", "127.0.0.1", "-p", s.port, "--forceflush"))
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	s.stdout = out
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start iperf3: %w", err)
	}
	lines := bufio.NewScanner(out)
	kill := time.AfterFunc(5*time.Second, func() { _ = s.cmd.Cancel() })
	defer kill.Stop()
	for lines.Scan() {
		if strings.Contains(lines.Text(), "listening") {
			go func() { _, _ = io.Copy(io.Discard, out) }()
			return s, nil
		}
	}
	_ = s.close()
	return nil, errors.New("iperf3: not measured, its server did not start listening")
}

func (s *iperfServer) close() error {
	if s == nil {
		return nil
	}
	_ = s.cmd.Cancel()
	_ = s.cmd.Wait()
	return nil
}

// iperfEnd is what is read of iperf3's report.
type iperfEnd struct {
	Error string `json:"error"`
	End   struct {
		Received struct {
			Seconds float64 `json:"seconds"`
			Bytes   int64   `json:"bytes"`
		} `json:"sum_received"`
		CPU struct {
			Host   float64 `json:"host_total"` // per cent of one CPU
			Remote float64 `json:"remote_total"`
		} `json:"cpu_utilization_percent"`
	} `json:"end"`
}

// run sends about that many bytes over one stream.
func (s *iperfServer) run(ctx context.Context, bytes int64, args ...string) (Measure, error) {
	for try := 0; ; try++ {
		cmd := child.OwnGroup(exec.CommandContext(ctx, "iperf3", append([]string{"-c", "127.0.0.1", "-p", s.port, "-n", strconv.FormatInt(bytes, 10), "-J"}, args...)...))
		out, err := cmd.Output()
		var r iperfEnd
		if jsonErr := json.Unmarshal(out, &r); jsonErr != nil || r.Error != "" {
			err = errors.Join(err, jsonErr, errors.New(r.Error))
		}
		if err == nil && r.End.Received.Seconds > 0 {
			e := r.End
			return Measure{Bytes: e.Received.Bytes, Seconds: e.Received.Seconds, CPUSeconds: (e.CPU.Host + e.CPU.Remote) / 100 * e.Received.Seconds}, nil
		}
		// The server may still be at the end of the run before.
		if try == 3 || ctx.Err() != nil {
			return Measure{}, fmt.Errorf("run iperf3: %w", err)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func (s *iperfServer) contestants(bytes int64) []contestant {
	if s == nil {
		return nil
	}
	one := func(name, what string, args ...string) contestant {
		return contestant{name: name, what: what, run: func(ctx context.Context) (Measure, error) { return s.run(ctx, bytes, args...) }}
	}
	list := []contestant{
		one(iperf, "iperf3, one stream, its defaults (writes of 128 KiB)"+hostsControl()),
		one(iperf1M, "the same, writes of 1 MiB", "-l", "1M"),
	}
	if c := lanesControl(); c != "" {
		list = append(list, one(iperf1M+" -C "+c, "the same with our lanes' congestion control", "-l", "1M", "-C", c))
	}
	return list
}
