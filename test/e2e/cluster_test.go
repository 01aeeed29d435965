package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

// options say what `headrace up` is started with.
type options struct {
	model string // the tiny one
	nodes int    // 1
	etcd  string // embedded
	data  string // a folder of its own; dir/data
	args  []string
	env   []string
}

// cluster is a running `headrace up`.
type cluster struct {
	t     testing.TB
	dir   string // everything it writes, the logs too
	data  string
	mark  string
	cmd   *exec.Cmd
	ended chan struct{} // closed when up has ended
	exit  error
	ready readyFile
	reg   *registry.Registry
	table *registry.Table
	addrs map[string]bool // all that was ever listened on
	over  bool            // its end was looked at
}

// readyFile is what up writes when everything answers.
type readyFile struct {
	PID  int    `json:"pid"`
	URL  string `json:"url"`
	Etcd string `json:"etcd"`
}

var clusters atomic.Int64

// in makes the cluster report to a subtest while that runs.
func (c *cluster) in(t *testing.T) {
	outer := c.t
	c.t = t
	t.Cleanup(func() { c.t = outer })
}

// prepare makes the command without starting it.
func prepare(t testing.TB, o options) *cluster {
	t.Helper()
	n := clusters.Add(1)
	c := &cluster{t: t, ended: make(chan struct{}), addrs: map[string]bool{}}
	c.mark = fmt.Sprintf("%d-%d", os.Getpid(), n)
	c.dir = filepath.Join(scratch, strconv.FormatInt(n, 10))
	for _, sub := range []string{"tmp", "run"} {
		if err := os.MkdirAll(filepath.Join(c.dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if o.model == "" {
		o.model = tinyModel(t)
	}
	if o.nodes == 0 {
		o.nodes = 1
	}
	if c.data = o.data; c.data == "" {
		c.data = filepath.Join(c.dir, "data")
	}
	args := []string{"up", "--ready-file", filepath.Join(c.dir, "ready.json"), "--data-dir", c.data,
		"--listen", "127.0.0.1:0", "--model", o.model, "--nodes", strconv.Itoa(o.nodes), "--debug"}
	if o.etcd != "" {
		args = append(args, "--etcd", o.etcd)
	}
	c.cmd = exec.Command(bin(t), append(args, o.args...)...)
	c.cmd.Env = append(c.environ(), o.env...)
	// A process group of its own, as a shell gives it; and it must not outlive a test binary that is killed.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return c
}

// environ is the test's environment less what would configure headrace, with the cluster's own folders.
func (c *cluster) environ() []string {
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "HEADRACE_") {
			env = append(env, e)
		}
	}
	return append(env, "TMPDIR="+filepath.Join(c.dir, "tmp"), "XDG_RUNTIME_DIR="+filepath.Join(c.dir, "run"), markName+"="+c.mark)
}

// launch starts the command and returns at once.
func (c *cluster) launch() {
	c.t.Helper()
	log, err := os.Create(filepath.Join(c.dir, "up.log"))
	if err != nil {
		c.t.Fatal(err)
	}
	c.cmd.Stdout, c.cmd.Stderr = log, log
	if err := c.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	_ = log.Close()
	go func() {
		c.exit = c.cmd.Wait()
		close(c.ended)
	}()
	c.t.Cleanup(c.cleanup)
}

// start starts a cluster and waits until it is ready.
func start(t testing.TB, o options) *cluster {
	t.Helper()
	c := prepare(t, o)
	c.launch()
	c.awaitReady()
	return c
}

func (c *cluster) awaitReady() {
	c.t.Helper()
	c.awaitUp()
	c.prefill()
	c.decode()
	c.routed()
}

// awaitUp waits until up says that it is ready, whatever its workers are.
func (c *cluster) awaitUp() {
	c.t.Helper()
	eventually(c.t, time.Minute, "headrace up is ready", func() error {
		select {
		case <-c.ended:
			c.t.Fatalf("headrace up has ended: %v", c.exit)
		default:
		}
		data, err := os.ReadFile(filepath.Join(c.dir, "ready.json"))
		if err != nil {
			return err
		}
		return json.Unmarshal(data, &c.ready)
	})
	ctx := context.Background() // the table follows for as long as it lives
	var err error
	if c.reg, err = registry.Open(ctx, registry.Config{Endpoints: []string{c.ready.Etcd}}); err != nil {
		c.t.Fatal(err)
	}
	if c.table, err = c.reg.Watch(ctx); err != nil {
		c.t.Fatal(err)
	}
}

// routed waits until the router has both workers with their daemons too: its table is its own, and on a folder whose owner was
// killed it has those of before, too, until their leases end.
func (c *cluster) routed() {
	c.t.Helper()
	eventually(c.t, waitRestart, "the router knows all workers with their daemons", func() error {
		var st struct {
			Workers []struct {
				ID       string `json:"id"`
				NodeData string `json:"node_data"`
			} `json:"workers"`
		}
		if err := getJSON("http://"+c.view().Routers[0].Admin+"/status", &st); err != nil {
			return err
		}
		with := 0
		for _, w := range st.Workers {
			if w.NodeData != "" {
				with++
			}
		}
		if with != len(c.view().Workers) {
			return fmt.Errorf("it has %+v", st.Workers)
		}
		return nil
	})
}

func (c *cluster) url() string { return c.ready.URL }

// note remembers addresses, to see at the end that nobody listens there any more.
func (c *cluster) note(addrs ...string) {
	for _, a := range addrs {
		if a != "" {
			c.addrs[a] = true
		}
	}
}

// view is who is in the registry and alive.
func (c *cluster) view() *registry.View {
	v := *c.table.Snapshot()
	live := registry.View{Revision: v.Revision}
	for _, n := range v.Nodes {
		if alive(n.PID) {
			c.note(n.Admin, n.DataAddr)
			live.Nodes = append(live.Nodes, n)
		}
	}
	for _, w := range v.Workers {
		if alive(w.PID) {
			c.note(w.Addr)
			live.Workers = append(live.Workers, w)
		}
	}
	for _, r := range v.Routers {
		if alive(r.PID) {
			c.note(r.Addr, r.Admin)
			live.Routers = append(live.Routers, r)
		}
	}
	return &live
}

// workerOf finds the living worker of a role that has a node daemon.
func (c *cluster) workerOf(role string) worker {
	c.t.Helper()
	var found worker
	eventually(c.t, 20*time.Second, "a "+role+" worker is registered with its node", func() error {
		v := c.view()
		for _, w := range v.Workers {
			if _, ok := v.Node(w.NodeID); ok && w.Role == role && w.NodeData != "" {
				found = worker{w}
				return nil
			}
		}
		return fmt.Errorf("workers %+v, nodes %+v", v.Workers, v.Nodes)
	})
	return found
}

func (c *cluster) prefill() worker { c.t.Helper(); return c.workerOf(registry.RolePrefill) }
func (c *cluster) decode() worker  { c.t.Helper(); return c.workerOf(registry.RoleDecode) }

// nodeOf is the living daemon a worker lends its memory to.
func (c *cluster) nodeOf(w worker) node {
	c.t.Helper()
	n, ok := c.view().Node(w.NodeID)
	if !ok {
		c.t.Fatalf("node %s of worker %s is not registered", w.NodeID, w.ID)
	}
	return node{n}
}

// blocksBack waits until every living worker holds no block and no request.
func (c *cluster) blocksBack(limit time.Duration, what string) time.Duration {
	c.t.Helper()
	return eventually(c.t, limit, "all blocks are back "+what, func() error {
		var errs []error
		for _, w := range c.view().Workers {
			errs = append(errs, worker{w}.idle())
		}
		return errors.Join(errs...)
	})
}

// moved sums up what has landed at the daemons, in leases and bytes.
func (c *cluster) moved() (settled, bytes uint64) {
	c.t.Helper()
	settled, bytes, err := c.movedNow()
	if err != nil {
		c.t.Fatal(err)
	}
	return settled, bytes
}

// movedNow is moved where a daemon may just have been killed: it is listed for a while yet.
func (c *cluster) movedNow() (settled, bytes uint64, err error) {
	for _, n := range c.view().Nodes {
		st, err := node{n}.status()
		if err != nil {
			return 0, 0, err
		}
		settled += st.Totals.LeasesSettled
		bytes += st.Totals.BytesLanded
	}
	return settled, bytes, nil
}

// split waits until a request is served by both workers again: its KV really moves.
func (c *cluster) split(limit time.Duration) time.Duration {
	c.t.Helper()
	begun := time.Now()
	err := pollEach(100*time.Millisecond, limit, func() error {
		before, _, err := c.movedNow()
		if err != nil {
			return err
		}
		r := request{Prompt: freshPrompt(40), MaxTokens: 4}
		st := post(c.url(), r)
		a, err := st.within(waitShort)
		if err != nil {
			st.hangUp()
			return err
		}
		if a.Error != nil || !a.Done {
			return errors.New(a.outcome())
		}
		after, _, err := c.movedNow()
		if err == nil && after == before {
			err = errors.New("the answer was right, but no KV moved")
		}
		return err
	})
	if err != nil {
		c.t.Fatalf("a request goes through prefill, transfer and decode: not within %s: %v", limit, err)
	}
	return time.Since(begun)
}

// healthyAfter is how old a child must be for up to restart it at once; what dies younger waits up to 5 s.
const healthyAfter = time.Second

// grown waits until every part is past that age, so that a fault shows a restart and not a back-off.
func (c *cluster) grown() {
	c.t.Helper()
	err := pollEach(50*time.Millisecond, waitShort, func() error {
		v := c.view()
		youngest := time.Time{}
		for _, n := range v.Nodes {
			youngest = latest(youngest, n.Started)
		}
		for _, w := range v.Workers {
			youngest = latest(youngest, w.Started)
		}
		if age := time.Since(youngest); age < healthyAfter {
			return fmt.Errorf("the youngest part is %v old", age)
		}
		return nil
	})
	if err != nil {
		c.t.Fatalf("parts stay alive: %v", err)
	}
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// interrupt sends SIGINT to up, or to its whole process group as a terminal does, and waits for its end.
func (c *cluster) interrupt(group bool) {
	c.t.Helper()
	c.view() // notes the addresses
	pid := c.cmd.Process.Pid
	if group {
		pid = -pid
	}
	c.disconnect()
	if err := signal(pid, syscall.SIGINT); err != nil {
		c.t.Fatal(err)
	}
	c.awaitEnd(15 * time.Second)
}

func (c *cluster) awaitEnd(limit time.Duration) {
	c.t.Helper()
	if err := poll(limit, func() error {
		select {
		case <-c.ended:
			return nil
		default:
			return errors.New("it lives")
		}
	}); err != nil {
		_ = syscall.Kill(c.cmd.Process.Pid, syscall.SIGQUIT) // its stacks go to the log
		c.t.Fatalf("headrace up has not ended %s after the signal; living: %s", limit, describe(marked(c.mark)))
	}
}

// disconnect closes the test's own connections to the cluster.
func (c *cluster) disconnect() {
	httpClient.CloseIdleConnections()
	if c.reg != nil {
		// etcd may be gone already: nothing of ours is announced, so there is nothing to withdraw.
		_ = c.reg.Close()
		c.reg = nil
	}
}

// leavesNothing waits until nothing of a cluster that has ended is left.
func (c *cluster) leavesNothing(limit time.Duration) {
	c.t.Helper()
	var addrs []string
	for a := range c.addrs {
		addrs = append(addrs, a)
	}
	eventually(c.t, limit, "nothing is left", func() error { return noLeftovers(c.mark, c.dir, addrs) })
	c.over = true
}

// cleanup ends what still runs, looks at what is left and at the logs.
func (c *cluster) cleanup() {
	defer c.disconnect()
	select {
	case <-c.ended:
	default:
		if c.t.Failed() {
			c.dumpStacks()
		}
		c.interrupt(false)
		if c.exit != nil {
			c.t.Errorf("headrace up ended with %v after Ctrl-C, want status 0", c.exit)
		}
	}
	if !c.over && !c.t.Failed() {
		c.leavesNothing(5 * time.Second)
	}
	for _, pid := range marked(c.mark) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	c.readLogs()
	_ = os.RemoveAll(c.dir)
}

var crash = regexp.MustCompile(`(?m)^(panic:|fatal error:|WARNING: DATA RACE|goroutine \d+ .*\[running)`)

// readLogs fails the test when a process crashed, and prints the logs of a test that failed.
func (c *cluster) readLogs() {
	logs := map[string][]byte{}
	for _, root := range []string{c.dir, c.data} {
		_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(path, ".log") && e.Name() != "etcd.log" {
				logs[path], _ = os.ReadFile(path)
			}
			return nil
		})
	}
	for path, data := range logs {
		if at := crash.FindIndex(data); at != nil && !c.t.Failed() {
			c.t.Errorf("%s: a process crashed: %.4000s", filepath.Base(path), data[at[0]:])
		}
	}
	if !c.t.Failed() && !showLogs {
		return
	}
	for path, data := range logs {
		c.t.Logf("---- %s (its end)\n%s", strings.TrimPrefix(path, scratch), tail(data, 24<<10))
	}
}

func tail(data []byte, n int) []byte {
	if len(data) <= n {
		return data
	}
	data = data[len(data)-n:]
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		data = data[i+1:]
	}
	return data
}

// dumpStacks notes who lived when a test failed.
func (c *cluster) dumpStacks() {
	c.t.Logf("living processes: %s", describe(marked(c.mark)))
	for _, w := range c.view().Workers {
		st, err := worker{w}.status()
		c.t.Logf("worker %s (%s): %+v %v", w.ID, w.Role, st, err)
	}
	for _, n := range c.view().Nodes {
		st, err := node{n}.status()
		c.t.Logf("node %s: leases %+v channels %+v totals %+v %v", n.ID, st.Leases, st.Channels, st.Totals, err)
	}
}
