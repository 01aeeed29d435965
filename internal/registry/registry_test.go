package registry

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const anyPort = "127.0.0.1:0"

func worker(id string) Worker {
	return Worker{ID: id, Role: RoleDecode, Model: "m", Addr: "127.0.0.1:1", Dialect: "native", Started: time.Unix(1, 0).UTC()}
}

func hasWorker(id string) func(*View) bool {
	return func(v *View) bool { _, ok := v.Worker(id); return ok }
}

func noWorkers(v *View) bool { return len(v.Workers) == 0 }

func TestAnnounceUpdateClose(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	r, other := open(t, e.Addr()), open(t, e.Addr())
	tables := []*Table{watch(t, r), watch(t, other)} // two watchers see the same

	a := announce(t, r, KindWorker, "w1", worker("w1"))
	announce(t, r, KindNode, "n1", Node{ID: "n1", Epoch: 7, Transports: []string{"tcp"}})
	announce(t, other, KindRouter, "r1", Router{ID: "r1", Addr: "x:1"})
	for i, table := range tables {
		v := await(t, table, "all three parts", func(v *View) bool {
			return len(v.Workers) == 1 && len(v.Nodes) == 1 && len(v.Routers) == 1
		})
		if n, ok := v.Node("n1"); !ok || n.Epoch != 7 || n.Transports[0] != "tcp" {
			t.Errorf("table %d has node %+v", i, n)
		}
		if w, ok := v.Worker("w1"); !ok || !reflect.DeepEqual(w, worker("w1")) {
			t.Errorf("table %d has worker %+v", i, w)
		}
		if _, ok := v.Router("r2"); ok {
			t.Errorf("table %d knows a router that is not there", i)
		}
	}

	changed := worker("w1")
	changed.NodeData = "127.0.0.1:99"
	if err := a.Update(changed); err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		await(t, table, "the update", func(v *View) bool { w, _ := v.Worker("w1"); return w.NodeData == changed.NodeData })
	}
	before := tables[0].Snapshot()
	closed(t, a)
	if err := a.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	for _, table := range tables {
		await(t, table, "the worker to leave", noWorkers)
	}
	if !hasWorker("w1")(before) {
		t.Error("an old view changed")
	}
	if err := a.Update(changed); !errors.Is(err, ErrClosed) {
		t.Errorf("update after close: %v, want ErrClosed", err)
	}
}

func TestAnnounceRefuses(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	r := open(t, e.Addr())
	rows := []struct {
		kind  Kind
		id    string
		value any
		want  string
	}{
		{"things", "a", worker("a"), "unknown kind"},
		{KindWorker, "", worker(""), "1 to 128 bytes"},
		{KindWorker, "a/b", worker("a/b"), "no slash"},
		{KindWorker, "a", worker("b"), "names itself"},
		{KindWorker, "a", make(chan int), "unsupported type"},
		{KindWorker, "a", Worker{ID: "a", Model: strings.Repeat("x", valueBytesMax)}, "at most"},
	}
	for _, row := range rows {
		_, err := r.Announce(t.Context(), row.kind, row.id, row.value)
		if err == nil {
			err = errWanted
		}
		if !strings.Contains(err.Error(), row.want) {
			t.Errorf("announce %s %q: %v, want %q", row.kind, row.id, err, row.want)
		}
	}
	announce(t, r, KindWorker, "a", worker("a"))
	if _, err := r.Announce(t.Context(), KindWorker, "a", worker("a")); err == nil {
		t.Error("a second announcement of one id by one process was taken")
	}
}

func TestSilentProcessIsDelisted(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	table := watch(t, open(t, e.Addr()))
	dying := openTTL(t, e.Addr(), time.Second)
	announce(t, dying, KindWorker, "w", worker("w"))
	await(t, table, "the worker", hasWorker("w"))
	abandon(t, dying)
	await(t, table, "the lease to expire", noWorkers)
}

func TestWithdrawDelistsWhileTablesGoOn(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	r, other := open(t, e.Addr()), open(t, e.Addr())
	table, far := watch(t, r), watch(t, other)
	a, err := r.Keep(KindWorker, "w", worker("w"))
	if err != nil {
		t.Fatal(err)
	}
	await(t, far, "the worker", hasWorker("w"))
	if err := r.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	await(t, far, "the worker to leave", noWorkers)
	if _, err := r.Keep(KindWorker, "x", worker("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("keep after withdraw: %v, want ErrClosed", err)
	}
	if err := a.Update(worker("w")); !errors.Is(err, ErrClosed) {
		t.Errorf("update after withdraw: %v, want ErrClosed", err)
	}
	announce(t, other, KindWorker, "z", worker("z"))
	await(t, table, "what others announce", hasWorker("z"))
}

func TestSuccessorOutlivesPredecessor(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	table := watch(t, open(t, e.Addr()))
	first, second := open(t, e.Addr()), open(t, e.Addr())
	a := announce(t, first, KindWorker, "w", worker("w"))
	next := worker("w")
	next.PID = 2
	announce(t, second, KindWorker, "w", next)
	closed(t, a)
	marker := announce(t, second, KindWorker, "z", worker("z"))
	v := await(t, table, "the marker", hasWorker("z"))
	if w, _ := v.Worker("w"); w.PID != 2 {
		t.Errorf("the predecessor's close took the successor's entry: %+v", v.Workers)
	}
	_ = marker.Close()
}

func TestLostLeaseRegistersAgain(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	watcher := open(t, e.Addr())
	table := watch(t, watcher)
	r := openTTL(t, e.Addr(), 2*time.Second)
	announce(t, r, KindWorker, "w", worker("w"))
	await(t, table, "the worker", hasWorker("w"))
	r.mu.Lock()
	lease := r.lease
	r.mu.Unlock()
	if _, err := watcher.cli.Revoke(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	await(t, table, "the entry to go", noWorkers)
	await(t, table, "the entry to come back", hasWorker("w"))
}

func TestEtcdKilledAndRestarted(t *testing.T) {
	dir := t.TempDir()
	p := startEtcdProcess(t, dir)
	r, watcher := open(t, p.addr), open(t, p.addr)
	table := watch(t, watcher)
	a := announce(t, r, KindWorker, "w", worker("w"))
	await(t, table, "the worker", hasWorker("w"))

	p.kill()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := r.Ping(ctx); err == nil {
		t.Error("a killed etcd answered")
	}
	if !hasWorker("w")(table.Snapshot()) {
		t.Error("the table forgot its view while etcd was away")
	}
	changed := worker("w")
	changed.Model = "changed while etcd was away"
	if err := a.Update(changed); err != nil {
		t.Fatal(err)
	}
	p.start(t)
	await(t, table, "the update", func(v *View) bool { w, _ := v.Worker("w"); return w.Model == changed.Model })
	late := announce(t, r, KindWorker, "late", worker("late"))
	await(t, table, "a worker announced after the restart", hasWorker("late"))
	closed(t, late)
}

func TestEtcdLosesItsData(t *testing.T) {
	dir := t.TempDir()
	p := startEtcdProcess(t, filepath.Join(dir, "a"))
	r, watcher := openTTL(t, p.addr, 2*time.Second), open(t, p.addr)
	watcher.resyncEvery = 200 * time.Millisecond
	table := watch(t, watcher)
	announce(t, r, KindWorker, "w", worker("w"))
	gone := open(t, p.addr)
	announce(t, gone, KindWorker, "gone", worker("gone"))
	await(t, table, "both", func(v *View) bool { return len(v.Workers) == 2 })
	p.kill()
	abandon(t, gone)
	p.dir = filepath.Join(dir, "b")
	p.start(t)
	v := await(t, table, "only the living worker", func(v *View) bool { return len(v.Workers) == 1 })
	if !hasWorker("w")(v) {
		t.Errorf("the table has %+v", v.Workers)
	}
}

func TestWatchSurvivesCompaction(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	r := open(t, e.Addr())
	a := announce(t, r, KindWorker, "w", worker("w"))
	table := watch(t, r)
	// A table whose revision lies in compacted history, as one that was cut off for long.
	for i := range 5 {
		w := worker("w")
		w.PID = i + 1
		if err := a.Update(w); err != nil {
			t.Fatal(err)
		}
		await(t, table, "the update", func(v *View) bool { got, _ := v.Worker("w"); return got.PID == w.PID })
	}
	compact(t, r)
	old := &Table{r: r, changed: make(chan struct{}), revision: 1}
	old.view.Store(&View{})
	r.wg.Add(1)
	go old.run(t.Context())
	await(t, old, "the resync", func(v *View) bool { w, _ := v.Worker("w"); return w.PID == 5 })
	announce(t, r, KindWorker, "next", worker("next"))
	await(t, old, "what came after the resync", hasWorker("next"))
}

func TestUnreadableEntryIsLeftOut(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	r := open(t, e.Addr())
	table := watch(t, r)
	for key, value := range map[string]string{
		prefix + "workers/bad":   "{",
		prefix + "workers/liar":  `{"id":"other"}`,
		prefix + "unknown/thing": "{}",
		prefix + "stray":         "{}",
	} {
		if _, err := r.cli.Put(t.Context(), key, value); err != nil {
			t.Fatal(err)
		}
	}
	announce(t, r, KindWorker, "good", worker("good"))
	if v := await(t, table, "the good one", hasWorker("good")); len(v.Workers) != 1 {
		t.Errorf("the table has %+v", v.Workers)
	}
	if _, err := r.cli.Delete(t.Context(), prefix, clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	await(t, table, "all to be deleted", noWorkers)
}

func TestPruneDeletesTheDead(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	r := open(t, e.Addr())
	table := watch(t, r)
	for _, id := range []string{"a", "b"} {
		announce(t, r, KindWorker, id, worker(id))
	}
	await(t, table, "both", func(v *View) bool { return len(v.Workers) == 2 })
	err := r.Prune(t.Context(), func(entry any) bool { w, ok := entry.(Worker); return ok && w.ID == "a" })
	if err != nil {
		t.Fatal(err)
	}
	v := await(t, table, "one to go", func(v *View) bool { return len(v.Workers) == 1 })
	if !hasWorker("b")(v) {
		t.Errorf("prune left %+v", v.Workers)
	}
}

func TestUnixListener(t *testing.T) {
	dir, err := os.MkdirTemp("", "registry") // a test's own folder may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	e := startEtcd(t, filepath.Join(dir, "data"), "unix://"+filepath.Join(dir, "s"))
	if err := open(t, e.Addr()).Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestRefusesToListenBeyondLoopback(t *testing.T) {
	for _, addr := range []string{"0.0.0.0:1", ":1", "example.com:1", "nonsense", "unix://relative"} {
		e, err := StartEmbedded(EmbeddedConfig{Dir: t.TempDir(), ClientAddr: addr})
		if err == nil {
			_ = e.Close()
			t.Errorf("etcd listens on %q", addr)
		}
	}
}

func TestPortInUse(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	second, err := StartEmbedded(EmbeddedConfig{Dir: t.TempDir(), ClientAddr: e.Addr()})
	if err == nil {
		_ = second.Close()
		t.Fatal("two etcds listen on one port")
	}
	if !strings.Contains(err.Error(), "address already in use") {
		t.Error(err)
	}
}

func TestWithoutEtcdDeadlinesHold(t *testing.T) {
	r, err := Open(t.Context(), Config{Endpoints: []string{"unix:///nonexistent/etcd"}})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := r.Announce(ctx, KindWorker, "w", worker("w")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("announce: %v, want the deadline", err)
	}
	if _, err := r.Watch(ctx); err == nil {
		t.Error("watch found an etcd")
	}
	if _, err := Open(t.Context(), Config{}); err == nil {
		t.Error("no endpoints were taken")
	}
}

func TestClosedRegistryRefuses(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	r := open(t, e.Addr())
	table := watch(t, r)
	announce(t, r, KindWorker, "w", worker("w"))
	await(t, table, "the worker", hasWorker("w"))
	if err := errors.Join(r.Close(), r.Close()); err != nil {
		t.Fatal(err)
	}
	if !hasWorker("w")(table.Snapshot()) || !errors.Is(table.Err(), ErrClosed) {
		t.Errorf("after close the table has %+v, err %v", table.Snapshot(), table.Err())
	}
	if _, err := r.Announce(t.Context(), KindWorker, "x", worker("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("announce: %v, want ErrClosed", err)
	}
}

func FuzzDecodeEntry(f *testing.F) {
	f.Add(prefix+"workers/w", []byte(`{"id":"w","role":"decode"}`))
	f.Add(prefix+"nodes/n", []byte(`{"id":"n","epoch":18446744073709551615}`))
	f.Add(prefix+"routers/", []byte(`{}`))
	f.Add("", []byte{0xff})
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		entry, err := decodeEntry(key, value)
		if err != nil {
			return
		}
		v := newView(1, map[string]any{key: entry})
		if len(v.Nodes)+len(v.Workers)+len(v.Routers) != 1 {
			t.Fatalf("%q is in no list of the view", key)
		}
		kind, id, err := splitKey(key)
		if err != nil || keyOf(kind, id) != key {
			t.Fatalf("%q splits into %q %q, %v", key, kind, id, err)
		}
	})
}

// A worker that is taken out while etcd does not answer must not stay listed because its process goes on renewing the lease.
func TestClosedWhileEtcdIsAwayIsDeletedLater(t *testing.T) {
	p := startEtcdProcess(t, t.TempDir())
	r := openTTL(t, p.addr, time.Minute)
	kept := announce(t, r, KindWorker, "w", Worker{ID: "w"})
	other := announce(t, r, KindWorker, "x", Worker{ID: "x"})
	table := watch(t, open(t, p.addr))
	await(t, table, "both", func(v *View) bool { return len(v.Workers) == 2 })
	signalEtcd(t, p, syscall.SIGSTOP)
	err := kept.Close()
	err2 := other.Close()
	again, err3 := r.Keep(KindWorker, "x", Worker{ID: "x", Model: "new"})
	signalEtcd(t, p, syscall.SIGCONT)
	if err == nil || err2 == nil || err3 != nil {
		t.Errorf("closed with %v and %v, announced again with %v", err, err2, err3)
	}
	await(t, table, "w gone and x new", func(v *View) bool {
		_, w := v.Worker("w")
		x, _ := v.Worker("x")
		return !w && x.Model == "new"
	})
	closed(t, again)
}

func signalEtcd(t *testing.T, p *etcdProcess, sig syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}
