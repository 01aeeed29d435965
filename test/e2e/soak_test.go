package e2e

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

// soak is how much TestSoak does.
type soak struct {
	streams  int // open at once, at the least
	ramp     time.Duration
	plateau  time.Duration // the time that is looked at
	every    time.Duration // between samples
	rate     float64       // tokens a second of each stream
	shortest int           // answer, tokens
	longest  int
}

// How much more the last third of the samples may show than the middle third, medians: garbage that is not collected yet comes
// and goes, by some megabytes in a short run.
const (
	soakShare      = 0.05
	soakShareRSS   = 0.1 // resident memory comes up to what the collector allows for many minutes: buffers' pages are touched one by one
	soakBytesShort = 8 << 20
	soakBytes      = 2 << 20
	soakCount      = 20 // of goroutines and descriptors: streams end and begin
)

// soakTable is an engine whose steps all take the same time.
const soakTable = `{blocks: 65536, context: 8192, batch_tokens: 65536, streams_max: 4096, waiting_max: 8192, answer_tokens: 0,
prefill: [{tokens: 0, seconds: 0}, {tokens: 1, seconds: 0.001}, {tokens: 65536, seconds: 0.05}], prefill_context_seconds: 0,
decode: [{streams: 1, context: 0, seconds: %[1]g}, {streams: 4096, context: 0, seconds: %[1]g},
  {streams: 1, context: 8192, seconds: %[1]g}, {streams: 4096, context: 8192, seconds: %[1]g}]}
`

// soakGC has the collector run often enough for resident memory to tell something within the test: by default garbage may become as
// much as what is in use, which takes 2,000 streams minutes.
const soakGC = "GOGC=25"

// TestSoak keeps streams open through a router in front of stand-ins, two for prefill and two for decode. Some clients leave, some
// read slowly. The router's memory, goroutines and descriptors stay what they are, and in the end nothing is left.
// 200 streams for a quarter of a minute; 2,000 for five minutes with HEADRACE_FULL.
func TestSoak(t *testing.T) {
	needAll(t)
	s := soak{streams: 200, ramp: 3 * time.Second, plateau: 12 * time.Second, every: 250 * time.Millisecond, rate: 4, shortest: 4, longest: 30}
	slack := int64(soakBytesShort)
	if full {
		s = soak{streams: 2000, ramp: 30 * time.Second, plateau: 5 * time.Minute, every: time.Second, rate: 1, shortest: 10, longest: 60}
		slack = soakBytes
	}
	c := standins(t, s)
	base := c.sampled()
	load := newSoakLoad(s, c.ready.URL)
	load.start()
	defer load.end()
	if err := pollEach(s.every, s.ramp+time.Minute, func() error {
		if st := c.sampled(); st.active < int64(s.streams) {
			return errors.Join(fmt.Errorf("%d of %d are", st.active, s.streams), load.failures())
		}
		return nil
	}); err != nil {
		t.Fatalf("all streams are open: %v", err)
	}
	samples := c.watch(s.plateau, s.every)
	load.end()
	t.Logf("%d streams, %v: %d ended, %d with an error, %d were left, %d clients read slowly, %d tokens, %d bytes", s.streams, s.plateau, load.whole.Load(), load.refused.Load(), load.left.Load(), load.slow.Load(), load.tokens.Load(), load.bytes.Load())
	showSoak(t, base, samples)
	if failed := load.failures(); failed != nil {
		t.Errorf("clients: %v", failed)
	}
	if load.whole.Load() == 0 || load.left.Load() == 0 || load.slow.Load() == 0 || load.refused.Load() > load.whole.Load() {
		t.Error("too little is shown")
	}
	flat(t, samples, int64(s.streams), slack)
	took := eventually(t, time.Minute, "everything is back", func() error { return c.back(base) })
	t.Logf("%.1f s after the streams' end %s", took.Seconds(), c.sampled())
}

// sample is a router's state.
type sample struct {
	at                                               time.Duration
	rss, live                                        int64 // bytes; live is what the last collection found in use
	goroutines, descriptors, active, conns, legs, up int64 // up is of idle connections to workers
}

func (s sample) String() string {
	return fmt.Sprintf("%6.1f s  %6.1f MB RSS  %6.1f MB live  %5d goroutines  %5d descriptors  %5d requests  %5d clients  %5d legs  %4d idle",
		s.at.Seconds(), float64(s.rss)/1e6, float64(s.live)/1e6, s.goroutines, s.descriptors, s.active, s.conns, s.legs, s.up)
}

// standins starts the parts.
func standins(t *testing.T, s soak) *soakRig {
	t.Helper()
	n := clusters.Add(1)
	c := &soakRig{cluster: &cluster{t: t, addrs: map[string]bool{}, mark: fmt.Sprintf("%d-%d", os.Getpid(), n), dir: filepath.Join(scratch, strconv.FormatInt(n, 10))}}
	c.data = filepath.Join(c.dir, "data")
	for _, sub := range []string{"tmp", "run", "data"} {
		if err := os.MkdirAll(filepath.Join(c.dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	table := filepath.Join(c.dir, "table.yaml")
	if err := os.WriteFile(table, fmt.Appendf(nil, soakTable, 1/s.rate), 0o600); err != nil {
		t.Fatal(err)
	}
	etcd, err := registry.StartEmbedded(registry.EmbeddedConfig{Dir: filepath.Join(c.dir, "etcd"), ClientAddr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := etcd.Close(); err != nil {
			t.Error(err)
		}
		c.readLogs()
		_ = os.RemoveAll(c.dir)
	})
	c.ready.Etcd = etcd.Addr()
	if c.reg, err = registry.Open(context.Background(), registry.Config{Endpoints: []string{etcd.Addr()}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.disconnect)
	eventually(t, time.Minute, "etcd answers", func() (err error) {
		c.table, err = c.reg.Watch(context.Background())
		return err
	})
	for _, role := range []string{registry.RolePrefill, registry.RoleDecode} {
		c.part(role, "standin", "--count", "2", "--role", role, "--etcd", etcd.Addr(), "--table", table, "--id", role)
	}
	c.router = c.part("router", "router", "--etcd", etcd.Addr(), "--listen", "127.0.0.1:0", "--data-dir", c.data,
		"--max-concurrent", strconv.Itoa(2*s.streams), "--max-queue", strconv.Itoa(2*s.streams), "--request-timeout", "30m")
	eventually(t, time.Minute, "the router has its workers", func() error {
		v := c.view()
		if len(v.Routers) != 1 {
			return errors.New("no router is listed")
		}
		c.ready.URL, c.admin = "http://"+v.Routers[0].Addr, "http://"+v.Routers[0].Admin
		st, err := c.status()
		if err != nil {
			return err
		}
		if len(st.Workers) != 4 {
			return fmt.Errorf("it has %v", st.Workers)
		}
		return nil
	})
	r := request{Model: "stand-in", Chat: "hello", MaxTokens: 3, Stream: true}
	if a := ask(c.ready.URL, r); a.Error != nil || !a.Done {
		t.Fatalf("a first request: %s", a.outcome())
	}
	httpClient.CloseIdleConnections()
	eventually(t, waitShort, "the router is idle", func() error {
		if st := c.sampled(); st.active != 0 || st.conns != 0 || st.legs != 0 {
			return errors.New(st.String())
		}
		return nil
	})
	return c
}

// soakRig is a router with stand-ins.
type soakRig struct {
	*cluster
	router int // its process
	admin  string
}

// part starts a process that ends with the test.
func (c *soakRig) part(name string, args ...string) int {
	c.t.Helper()
	log, err := os.Create(filepath.Join(c.dir, name+".log"))
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(bin(c.t), append(args, "--log-level", "warn")...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(c.environ(), soakGC), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGINT)
		if err := cmd.Wait(); err != nil {
			c.t.Errorf("%s: %v", name, err)
		}
	})
	return cmd.Process.Pid
}

// soakStatus is what is looked at of the router's /status.
type soakStatus struct {
	Active  int64      `json:"requests_active"`
	Conns   int64      `json:"client_conns"`
	Legs    int64      `json:"legs"`
	Idle    int64      `json:"worker_conns_idle"`
	Workers []struct{} `json:"workers"`
}

func (c *soakRig) status() (st soakStatus, err error) {
	resp, err := soakAdmin.Get(c.admin + "/status")
	if err != nil {
		return st, err
	}
	return st, readJSON(resp, &st)
}

// soakAdmin waits for a router that has little of a busy machine.
var soakAdmin = &http.Client{Timeout: waitHang, Transport: &http.Transport{DisableKeepAlives: true}}

// sampled looks at the router.
func (c *soakRig) sampled() sample {
	c.t.Helper()
	st, err := c.status()
	if err != nil {
		c.t.Fatal(err)
	}
	s := sample{active: st.Active, conns: st.Conns, legs: st.Legs, up: st.Idle, descriptors: int64(openFiles(c.router))}
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", c.router))
	if err != nil {
		c.t.Fatal(err)
	}
	var size int64
	if _, err := fmt.Sscan(string(statm), &size, &s.rss); err != nil {
		c.t.Fatal(err)
	}
	s.rss *= int64(os.Getpagesize())
	resp, err := soakAdmin.Get(c.admin + "/metrics")
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	s.goroutines, s.live = readGauges(resp)
	return s
}

// readGauges finds the goroutines and the live heap.
func readGauges(resp *http.Response) (goroutines, live int64) {
	body, _ := io.ReadAll(resp.Body)
	for lines := bufio.NewScanner(bytes.NewReader(body)); lines.Scan(); {
		name, text, _ := strings.Cut(lines.Text(), " ")
		v, _ := strconv.ParseFloat(text, 64)
		switch name {
		case "go_goroutines":
			goroutines = int64(v)
		case "go_gc_heap_live_bytes":
			live = int64(v)
		}
	}
	return goroutines, live
}

// watch samples for that long.
func (c *soakRig) watch(d, every time.Duration) []sample {
	c.t.Helper()
	var all []sample
	tick := time.NewTicker(every)
	defer tick.Stop()
	for begun := time.Now(); time.Since(begun) < d; <-tick.C {
		s := c.sampled()
		s.at = time.Since(begun)
		all = append(all, s)
	}
	return all
}

// showSoak prints the base and some of the samples.
func showSoak(t *testing.T, base sample, all []sample) {
	t.Helper()
	t.Logf("before    %s", base)
	for i := 0; i < len(all); i += max(1, len(all)/15) {
		t.Logf("          %s", all[i])
	}
}

// flat holds the last third of the samples against the middle one.
func flat(t *testing.T, all []sample, streams, slack int64) {
	t.Helper()
	third := len(all) / 3
	if third == 0 {
		t.Fatalf("%d samples", len(all))
	}
	for _, f := range []struct {
		name  string
		of    func(sample) int64
		share float64
		slack int64
	}{
		{"RSS", func(s sample) int64 { return s.rss }, soakShareRSS, slack},
		{"live heap", func(s sample) int64 { return s.live }, soakShare, slack},
		{"goroutines", func(s sample) int64 { return s.goroutines }, soakShare, soakCount},
		{"descriptors", func(s sample) int64 { return s.descriptors }, soakShare, soakCount},
	} {
		middle, last := medianOf(all[third:2*third], f.of), medianOf(all[2*third:], f.of)
		bound := middle + int64(f.share*float64(middle)) + f.slack
		t.Logf("%-12s middle third %11d, last third %11d: %+.1f %%, at most %d", f.name, middle, last, 100*float64(last-middle)/float64(max(middle, 1)), bound)
		if f.name == "live heap" && !full {
			continue // there may have been one collection or none
		}
		if last > bound || middle == 0 {
			t.Errorf("%s: it grows, from %d to %d, and may to %d", f.name, middle, last, bound)
		}
	}
	if open := medianOf(all, func(s sample) int64 { return s.active }); open < streams {
		t.Errorf("%d streams were open, want %d", open, streams)
	}
}

func medianOf(all []sample, of func(sample) int64) int64 {
	var v []int64
	for _, s := range all {
		v = append(v, of(s))
	}
	slices.Sort(v)
	return v[len(v)/2]
}

// back is nil when nothing of the streams is left anywhere.
func (c *soakRig) back(base sample) error {
	now := c.sampled()
	var errs []error
	if now.goroutines > base.goroutines+2 || now.active+now.conns+now.legs > 0 || now.descriptors-now.up > base.descriptors-base.up {
		errs = append(errs, fmt.Errorf("the router was %s\nand is %s", base, now))
	}
	for _, w := range c.view().Workers {
		errs = append(errs, worker{w}.idle())
	}
	return errors.Join(errs...)
}
