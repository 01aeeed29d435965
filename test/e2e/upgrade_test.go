package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/supervise"
)

// upgrades is how often the daemons are replaced in a row.
func upgrades() int {
	if full {
		return 10
	}
	return 2
}

// TestUpgrade: node daemons are replaced under load, again and again. No request is lost or altered, no engine is
// restarted, nothing piles up.
func TestUpgrade(t *testing.T) {
	needAll(t)
	for name, o := range map[string]options{
		"1 node":                   {nodes: 1},
		"1 node, tcp":              {nodes: 1, args: []string{"--transport", "tcp"}},
		"2 nodes":                  {nodes: 2},
		"2 nodes, 2 and 2 workers": {nodes: 2, args: []string{"--prefill", "2", "--decode", "2"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t, o)
			l := newLoad(t, c)
			c.split(waitRestart)
			l.begin(6)
			l.during(24) // connections that are kept for reuse are there by then
			before := c.census()
			for i := range upgrades() {
				was := c.census()
				l.during(4) // between two upgrades too
				l.upgrading.Store(true)
				took := c.upgrade()
				l.upgrading.Store(false)
				bounds.add("headrace upgrade, "+name, took, nil)
				now := c.census()
				for part, pid := range now.pids {
					switch isNode := strings.HasPrefix(part, "node"); {
					case isNode && pid == was.pids[part]:
						t.Errorf("upgrade %d: %s is the same process %d", i, part, pid)
					case !isNode && pid != was.pids[part]:
						t.Errorf("upgrade %d: %s is process %d, was %d", i, part, pid, was.pids[part])
					}
				}
			}
			l.during(10)
			after := c.census()
			l.end()
			c.blocksBack(waitShort, "after the upgrades")
			t.Logf("%d upgrades, %d answers, %d of them begun during one; redispatches %v, whole %v; longest silence of a stream %s, with no upgrade %s",
				upgrades(), l.right.Load(), l.inUpgrade.Load(), after.redispatches-before.redispatches, after.whole-before.whole,
				time.Duration(l.gapIn.Load()).Round(time.Millisecond), time.Duration(l.gapOut.Load()).Round(time.Millisecond))
			bounds.add("longest silence of a stream in an upgrade, "+name, time.Duration(l.gapIn.Load()), nil)
			if n := after.redispatches - before.redispatches; n > 0 {
				t.Errorf("%v requests were dispatched again", n)
			}
			for part, n := range after.files {
				if n > before.files[part]+16 { // connections that idle
					t.Errorf("%s has %d open files, had %d", part, n, before.files[part])
				}
			}
			c.split(waitRestart)
		})
	}
}

// census is what must not change, or only as it should.
type census struct {
	pids                map[string]int
	files               map[string]int
	redispatches, whole float64
}

func (c *cluster) census() census {
	c.t.Helper()
	s := census{pids: map[string]int{}, files: map[string]int{}}
	v := c.view()
	for _, n := range v.Nodes {
		s.pids[n.ID] = n.PID
	}
	for _, w := range v.Workers {
		s.pids[w.ID] = w.PID
	}
	for _, r := range v.Routers {
		s.pids[r.ID] = r.PID
		s.redispatches = c.metric("http://"+r.Admin+"/metrics", "headrace_router_redispatches_total", "")
		s.whole = c.metric("http://"+r.Admin+"/metrics", "headrace_router_decisions_total", `kind="whole"`)
	}
	for part, pid := range s.pids {
		s.files[part] = openFiles(pid)
	}
	return s
}

// metric sums up the samples of a metric that have a label.
func (c *cluster) metric(url, name, label string) (sum float64) {
	c.t.Helper()
	resp, err := adminClient.Get(url)
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		c.t.Fatalf("%s: %s", url, resp.Status)
	}
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		line := lines.Text()
		if at := strings.LastIndexByte(line, ' '); strings.HasPrefix(line, name) && strings.Contains(line, label) && at > 0 {
			v, _ := strconv.ParseFloat(line[at+1:], 64)
			sum += v
		}
	}
	return sum
}

// killNode kills a daemon and waits until another process stands in its place.
func (c *cluster) killNode(n node) {
	c.t.Helper()
	if err := signal(n.PID, syscall.SIGKILL); err != nil {
		c.t.Fatal(err)
	}
	eventually(c.t, waitRestart, "the daemon is started again", func() error {
		if again, ok := c.view().Node(n.ID); !ok || again.PID == n.PID {
			return fmt.Errorf("%+v", again)
		}
		return nil
	})
}

// upgrade runs headrace upgrade to its end.
func (c *cluster) upgrade() time.Duration {
	c.t.Helper()
	begun := time.Now()
	cmd := exec.Command(bin(c.t), "upgrade", "--data-dir", c.data, "--timeout", "100s")
	cmd.Env = c.environ()
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.t.Fatalf("headrace upgrade: %v\n%s", err, out)
	}
	if got, want := strings.Count(string(out), "took over"), len(c.view().Nodes); got != want {
		c.t.Errorf("headrace upgrade speaks of %d daemons, there are %d:\n%s", got, want, out)
	}
	return time.Since(begun)
}

// load is clients that ask without pause.
type load struct {
	t        *testing.T
	c        *cluster
	requests []request
	wants    []*answer
	stop     chan struct{}
	wg       sync.WaitGroup

	next, right   atomic.Int64
	inUpgrade     atomic.Int64
	upgrading     atomic.Bool
	gapIn, gapOut atomic.Int64
}

func newLoad(t *testing.T, c *cluster) *load {
	l := &load{t: t, c: c, stop: make(chan struct{})}
	o := oracleFor(t, tinyModel(t))
	for i := range 24 {
		r := sampled(request{Prompt: seededPrompt(uint64(70_000+i), 60+i*37%600), MaxTokens: 8 + i*29%160, Stream: i%3 != 0}, i)
		l.requests, l.wants = append(l.requests, r), append(l.wants, o.want(t, r))
	}
	return l
}

func (l *load) begin(clients int) {
	for range clients {
		l.wg.Go(func() {
			for {
				select {
				case <-l.stop:
					return
				default:
				}
				i := int(l.next.Add(1)) % len(l.requests)
				early := l.upgrading.Load()
				st := post(l.c.url(), l.requests[i])
				a, err := st.within(waitHang)
				if err == nil {
					err = a.equals(l.wants[i])
				}
				if err != nil {
					l.t.Errorf("request %d: %v", i, err)
					return
				}
				l.right.Add(1)
				gap := &l.gapOut
				if early || l.upgrading.Load() {
					l.inUpgrade.Add(1)
					gap = &l.gapIn
				}
				for old := gap.Load(); int64(a.Gap) > old && !gap.CompareAndSwap(old, int64(a.Gap)); old = gap.Load() {
				}
			}
		})
	}
}

// during waits until so many more answers have come.
func (l *load) during(n int64) {
	l.t.Helper()
	from := l.right.Load()
	eventually(l.t, waitHang, fmt.Sprintf("%d more answers", n), func() error {
		if got := l.right.Load() - from; got < n && !l.t.Failed() {
			return fmt.Errorf("%d", got)
		}
		return nil
	})
}

func (l *load) end() {
	close(l.stop)
	l.wg.Wait()
}

// TestUpgradeOfABrokenProgram: a new program that does not start leaves the running daemons as they are.
func TestUpgradeOfABrokenProgram(t *testing.T) {
	needAll(t)
	dir := t.TempDir()
	own := filepath.Join(dir, "headrace")
	copyFile(t, bin(t), own)
	c := prepare(t, options{nodes: 2})
	c.cmd.Path, c.cmd.Args[0] = own, own
	c.launch()
	c.awaitReady()
	was := c.census()
	if err := os.Remove(own); err != nil { // it is busy: it cannot be written to, but replaced
		t.Fatal(err)
	}
	if err := os.WriteFile(own, []byte("#!/bin/sh\necho this build is broken >&2\nexit 3\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin(t), "upgrade", "--data-dir", c.data, "--timeout", "60s")
	cmd.Env = c.environ()
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "this build is broken") || !strings.Contains(string(out), "goes on") {
		t.Errorf("headrace upgrade: %v\n%s", err, out)
	}
	if now := c.census(); fmt.Sprint(now.pids) != fmt.Sprint(was.pids) {
		t.Errorf("processes %v, were %v", now.pids, was.pids)
	}
	c.split(waitShort)
	if err := os.Remove(own); err != nil {
		t.Fatal(err)
	}
	copyFile(t, bin(t), own)
	c.upgrade()
	c.split(waitShort)
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, data, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestUpgradedDaemonIsSupervised: what took over is restarted when it dies, and stopped at the end.
func TestUpgradedDaemonIsSupervised(t *testing.T) {
	needAll(t)
	c := start(t, options{nodes: 2})
	c.upgrade()
	n := c.nodeOf(c.decode())
	c.grown()
	c.killNode(n)
	c.split(waitRestart)
	c.upgrade()
	c.split(waitShort)
	c.interrupt(true)
	c.wantExit(0)
	c.leavesNothing(waitShort)
}

// TestHangUpUpgradesADaemon: a daemon by itself, as systemd runs it, replaces itself on SIGHUP; so does up.
func TestHangUpUpgradesADaemon(t *testing.T) {
	needAll(t)
	c := start(t, options{nodes: 1})
	was := c.census()
	for _, pid := range []int{c.nodeOf(c.decode()).PID, c.cmd.Process.Pid} {
		eventually(t, waitRestart, "the upgrade before is over", func() error {
			s, err := supervise.ReadState(c.data)
			if err == nil && s.Upgrade.Running {
				err = errors.New("it runs")
			}
			return err
		})
		before := c.nodeOf(c.decode()).PID
		if err := signal(pid, syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		eventually(t, waitRestart, "the daemon is replaced", func() error {
			if now := c.nodeOf(c.decode()).PID; now == before || alive(before) {
				return fmt.Errorf("process %d, was %d", now, before)
			}
			return nil
		})
	}
	if now := c.census(); now.pids[c.decode().ID] != was.pids[c.decode().ID] {
		t.Errorf("processes %v, were %v", now.pids, was.pids)
	}
	c.split(waitShort)
}
