package sidecar

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

func TestEngineIsListedAsWhatItSaysAndStoppedInOrder(t *testing.T) {
	var ready registry.Worker
	r := start(t, func(c *Config) { c.OnReady = func(w registry.Worker) { ready = w } })
	w := r.board.next(t)
	if w == nil || w.Model != "fake" || w.ContextTokens != 2048 || w.BlockTokens != 32 || w.Blocks != 1024 || w.Engine != "vllm 0.32.0" || len(w.LoRAs) != 1 || w.LoRAs[0] != "poet" ||
		w.PID != os.Getpid() || w.EnginePID == 0 || w.Started.IsZero() || w.NodeData != "" || w.Addr != r.addr {
		t.Errorf("listed as %+v", w)
	}
	pids := r.pids()
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
	if w := r.board.next(t); w != nil {
		t.Errorf("left as %+v", w)
	}
	if ready.ID != "e0" {
		t.Error("OnReady was not called")
	}
	allDead(t, pids)
	if !strings.Contains(r.out.String(), "engine ends in order") {
		t.Error("it was not asked to end")
	}
}

func TestSlowEngineIsWaitedFor(t *testing.T) {
	r := start(t, nil, "slow")
	r.pids()
	if len(r.board.changes) != 0 {
		t.Error("it was listed before it was well")
	}
	r.set("up=1")
	if w := r.board.next(t); w == nil {
		t.Error("not listed")
	}
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
}

func TestEngineThatIsNeverWellIsGivenUp(t *testing.T) {
	r := start(t, func(c *Config) { c.StartTimeout, c.StopTimeout = 3*time.Second, time.Millisecond }, "slow", "stubborn")
	var pids []int
	eventually(t, "the engine to answer, or to be given up before it did", func() bool {
		body, err := fetch(r.addr, "/pids")
		return err == nil && json.Unmarshal(body, &pids) == nil || len(r.done) > 0
	})
	err := r.end()
	if err == nil || !strings.Contains(err.Error(), "--start-timeout") {
		t.Error(err)
	}
	allDead(t, pids)
}

func TestEngineThatDiesAtItsStartSaysWhy(t *testing.T) {
	r := start(t, nil, "dies")
	err := r.end()
	if err == nil || !strings.Contains(err.Error(), "died at its start: it ended with exit status 3; it said: ValueError: no room for the KV cache") {
		t.Error(err)
	}
	if len(r.board.changes) != 0 {
		t.Error("it was listed")
	}
}

func TestEngineThatHangsAtItsStartIsGivenUp(t *testing.T) {
	r := start(t, func(c *Config) { c.HangTimeout = 200 * time.Millisecond }, "slow", "raises")
	err := r.end()
	if err == nil || !strings.Contains(err.Error(), "hangs at its start: it said: zmq.error.ZMQError: Address already in use") {
		t.Error(err)
	}
}

func TestProgramThatIsNotThere(t *testing.T) {
	r := start(t, func(c *Config) { c.Command.Words = []string{"/nonexistent/vllm"} })
	if err := r.end(); err == nil || !strings.Contains(err.Error(), "/nonexistent/vllm") {
		t.Error(err)
	}
}

func TestEngineThatCrashesIsTakenOutAndLeavesNobody(t *testing.T) {
	r := start(t, nil)
	r.board.next(t)
	pids := r.pids()
	if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := r.end(); err == nil || !strings.Contains(err.Error(), "the engine died: it was ended by SIGKILL") {
		t.Error(err)
	}
	if w := r.board.next(t); w != nil {
		t.Errorf("left as %+v", w)
	}
	allDead(t, pids) // its child lived on
}

func TestEngineThatIsIllIsTakenOutAndPutBack(t *testing.T) {
	r := start(t, nil)
	first := r.board.next(t)
	for _, ill := range []string{"health=503", "model="} {
		r.set(ill)
		if w := r.board.next(t); w != nil {
			t.Fatalf("%s: %+v is listed", ill, w)
		}
		r.set("health=200&model=fake2")
		if w := r.board.next(t); w == nil || w.Model != "fake2" || !w.Started.After(first.Started) {
			t.Errorf("back as %+v", w)
		}
	}
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
}

func TestEngineThatHangsIsTakenOut(t *testing.T) {
	r := start(t, nil)
	r.board.next(t)
	pids := r.pids()
	if err := syscall.Kill(pids[0], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if w := r.board.next(t); w != nil {
		t.Fatalf("%+v is listed", w)
	}
	if err := syscall.Kill(pids[0], syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if w := r.board.next(t); w == nil {
		t.Error("not back")
	}
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
}

// TestStalledEngine: an engine whose HTTP server is well and which makes no step with requests to serve hangs.
func TestStalledEngine(t *testing.T) {
	s := &sidecar{stepped: time.Now()}
	at := func(ago time.Duration, running, steps float64) bool {
		s.stepped = s.stepped.Add(-ago)
		return s.stalled(&Figures{Running: running, Steps: steps})
	}
	for i, row := range []struct {
		ago            time.Duration
		running, steps float64
		want           bool
	}{
		{0, 1, 5, false}, {stallMax + time.Second, 0, 5, false}, {0, 1, 5, false}, {stallMax + time.Second, 1, 6, false},
		{stallMax + time.Second, 1, 6, true}, {0, 1, 7, false}, {stallMax + time.Second, 1, -1, false},
	} {
		if got := at(row.ago, row.running, row.steps); got != row.want {
			t.Errorf("row %d: stalled is %v", i, got)
		}
	}
	if !gone(errStalled) {
		t.Error("an engine that hangs is left in the registry")
	}
}

func TestRequestsInFlightAreWaitedFor(t *testing.T) {
	r := start(t, nil)
	r.board.next(t)
	r.set("running=1&waiting=1")
	r.cancel()
	if w := r.board.next(t); w != nil {
		t.Errorf("%+v is still listed", w)
	}
	eventually(t, "it to drain", func() bool { return strings.Contains(r.out.String(), "2 requests") })
	r.set("waiting=0")
	eventually(t, "it to drain", func() bool { return strings.Contains(r.out.String(), "1 requests") })
	if strings.Contains(r.out.String(), "engine ends in order") {
		t.Error("it was ended with a request in flight")
	}
	r.set("running=0")
	if err := r.end(); err != nil {
		t.Error(err)
	}
	if strings.Contains(r.out.String(), "cut off") {
		t.Error("requests were cut off")
	}
}

func TestDrainAndStopEndSometime(t *testing.T) {
	r := start(t, func(c *Config) { c.DrainTimeout, c.StopTimeout = 300*time.Millisecond, 300*time.Millisecond }, "stubborn")
	r.board.next(t)
	r.set("running=1")
	pids := r.pids()
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(r.out.String(), "requests are cut off") {
		t.Error("the drain had no end")
	}
	allDead(t, pids)
}

func TestHurryCutsDrainAndStopShort(t *testing.T) {
	hurry := make(chan struct{})
	r := start(t, func(c *Config) { c.Hurry = hurry }, "stubborn")
	r.board.next(t)
	r.set("running=1")
	pids := r.pids()
	r.cancel()
	close(hurry)
	if err := r.end(); err != nil {
		t.Error(err)
	}
	allDead(t, pids)
}

// TestKilledSidecarTakesItsEngineAlong: whatever is killed, and with -9, no process of the engine stays.
func TestKilledSidecarTakesItsEngineAlong(t *testing.T) {
	port, err := FreePort("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	cmd := exec.Command(self(), beSidecar, addr, "orphans", "stubborn")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pids := enginePIDs(t, addr)
	guard, _ := lineage(pids[0])
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	killed := time.Now()
	allDead(t, append(pids, guard))
	t.Logf("all gone after %s", time.Since(killed))
}

func TestKilledGuardTakesTheEngineAlong(t *testing.T) {
	r := start(t, nil, "orphans", "stubborn")
	r.board.next(t)
	pids := r.pids()
	guard, _ := lineage(pids[0])
	if err := syscall.Kill(guard, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := r.end(); err == nil || !strings.Contains(err.Error(), "its guard was killed") {
		t.Error(err)
	}
	allDead(t, pids)
}

func TestOrphansOfAnEngineThatEndedAreKilled(t *testing.T) {
	r := start(t, nil, "orphans")
	r.board.next(t)
	pids := r.pids()
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
	allDead(t, pids)
}

func TestWatchedEngineComesAndGoes(t *testing.T) {
	f := &fakeEngine{values: map[string]string{"up": "1", "health": "200", "model": "fake", "running": "0", "waiting": "0", "steps": "1"}}
	srv := httptest.NewServer(f)
	addr := strings.TrimPrefix(srv.URL, "http://")
	r := start(t, func(c *Config) { c.Command, c.Addr = nil, addr })
	w := r.board.next(t)
	if w == nil || w.EnginePID != 0 {
		t.Errorf("%+v", w)
	}
	srv.Close()
	if w := r.board.next(t); w != nil {
		t.Errorf("%+v is still listed", w)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Skip("somebody else took the port: ", err)
	}
	again := &http.Server{Handler: f}
	go func() { _ = again.Serve(l) }()
	defer again.Close()
	if w := r.board.next(t); w == nil {
		t.Error("not back")
	}
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
}

// daemon is a node daemon that says what it is set to say.
type daemon struct {
	says chan *Attachment
	*news
}

// news are of a daemon in the registry.
type news struct {
	mu      sync.Mutex // guards what follows
	epoch   uint64
	changed chan struct{}
}

func newDaemon() daemon {
	return daemon{make(chan *Attachment, 1), &news{changed: make(chan struct{})}}
}

func (n *news) Incarnation() (uint64, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.epoch, n.changed
}

func (n *news) change(epoch uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.epoch = epoch
	close(n.changed)
	n.changed = make(chan struct{})
}

func (d daemon) Look(context.Context, string) (*Attachment, error) {
	select {
	case a := <-d.says:
		d.says <- a
		if a != nil {
			return a, nil
		}
		return nil, errNotAttached
	default:
	}
	return nil, errors.New("no node daemon")
}

// TestEngineIsMadeToLookForItsDaemon: an idle vLLM does not notice that its daemon was restarted.
func TestEngineIsMadeToLookForItsDaemon(t *testing.T) {
	d := newDaemon()
	r := start(t, func(c *Config) { c.Daemon, c.Entry.Dialect = d, DialectVLLM })
	r.board.next(t)
	asked := func() string { body, _ := fetch(r.addr, "/asked"); return string(body) }
	if got := asked(); got != "" {
		t.Errorf("without any daemon it was asked for %s", got)
	}
	d.says <- nil
	eventually(t, "the engine to be asked for a token", func() bool { return asked() == `{"max_tokens":1,"model":"fake","prompt":"."}` })
	<-d.says
	d.says <- &Attachment{NodeID: "n0", NodeData: "h:1", About: &About{Fingerprint: "f"}}
	if w := r.board.next(t); w.NodeData != "h:1" {
		t.Errorf("%+v", w)
	}
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
}

// TestNewDaemonIsNewsAtOnce: nothing here waits for a probe, of which there is one an hour.
func TestNewDaemonIsNewsAtOnce(t *testing.T) {
	d := newDaemon()
	d.says <- &Attachment{NodeID: "n0", NodeData: "h:1", About: &About{Fingerprint: "f"}}
	r := start(t, func(c *Config) { c.Daemon, c.Entry.Dialect, c.ProbeEvery = d, DialectVLLM, time.Hour })
	if w := r.board.next(t); w.NodeData != "h:1" {
		t.Errorf("%+v", w)
	}
	d.change(0) // of somebody else
	<-d.says
	d.says <- nil
	d.change(7)
	if w := r.board.next(t); w == nil || w.NodeData != "" {
		t.Errorf("with a daemon that does not know it it is %+v", w)
	}
	<-d.says
	d.says <- &Attachment{NodeID: "n0", NodeData: "h:2", About: &About{Fingerprint: "f"}}
	d.change(8)
	if w := r.board.next(t); w.NodeData != "h:2" {
		t.Errorf("%+v", w)
	}
	r.cancel()
	if err := r.end(); err != nil {
		t.Error(err)
	}
}

func TestDaemonIsListedWhileItKnowsTheEngine(t *testing.T) {
	d := newDaemon()
	r := start(t, func(c *Config) { c.Daemon, c.Entry.Dialect = d, DialectVLLM })
	if w := r.board.next(t); w.NodeData != "" || w.Fingerprint != "" {
		t.Errorf("without a daemon it is %+v", w)
	}
	d.says <- &Attachment{NodeID: "n0", NodeData: "h:1", About: &About{Fingerprint: "f", BlockTokens: 64, Blocks: 512, TensorParallel: 2, Opaque: true, Layout: "l"}}
	if w := r.board.next(t); w.NodeID != "n0" || w.NodeData != "h:1" || w.Fingerprint != "f" || w.BlockTokens != 64 || w.Blocks != 512 || w.TensorParallel != 2 || !w.Opaque || w.Layout != "l" || w.ContextTokens != 2048 {
		t.Errorf("with a daemon it is %+v", w)
	}
	<-d.says
	if w := r.board.next(t); w == nil || w.NodeData != "" {
		t.Errorf("after the daemon it is %+v", w)
	}
	d.says <- &Attachment{NodeID: "n0", NodeData: "h:1", Leases: 3, About: &About{Fingerprint: "f"}}
	r.board.next(t)
	r.cancel()
	eventually(t, "the leases to be waited for", func() bool { return strings.Contains(r.out.String(), "3 leases") })
	<-d.says
	if err := r.end(); err != nil {
		t.Error(err)
	}
}
