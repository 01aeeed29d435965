package kvevents

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/internal/pythontest"
	"github.com/headrace/headrace/router/collect"
	"github.com/headrace/headrace/worker/kv"
)

const patience = 30 * time.Second

// account is what a pool said, beside what it was told to the world.
type account struct {
	*Publisher
	have map[kv.ContentID]bool
}

func (a *account) Stored(id, parent kv.ContentID, tokens []int32) {
	a.have[id] = true
	a.Publisher.Stored(id, parent, tokens)
}

func (a *account) Removed(id kv.ContentID) {
	delete(a.have, id)
	a.Publisher.Removed(id)
}

func listen(t *testing.T, addr string) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// work has prompts of random tokens, which share prefixes, computed in a pool that is too small for all.
func work(t *testing.T, pool *kv.Pool, a *account, r *rand.Rand, n int) {
	t.Helper()
	for range n {
		tokens := make([]int32, 16*(1+r.IntN(6)))
		for i := range tokens {
			tokens[i] = int32(i/16) + int32(r.IntN(2))<<(i/16*4)
			if i%16 > 0 {
				tokens[i] = tokens[i-1] + 70000
			}
		}
		found, at := pool.Match(tokens)
		more, err := pool.Alloc(len(tokens)/16 - len(found))
		if err != nil {
			t.Fatal(err)
		}
		for i, b := range more {
			from := 16 * (len(found) + i)
			at = pool.Commit(b, at, tokens[from:from+16])
		}
		pool.Release(append(found, more...))
		a.Flush()
	}
}

// TestTheRouterHearsAll holds that the collector has what the pool has, through late starts and new processes.
func TestTheRouterHearsAll(t *testing.T) {
	leaktest.Check(t)
	c := collect.New(collect.Config{Fetch: func(context.Context, string) (io.ReadCloser, error) { return nil, errors.New("no metrics") }})
	defer c.Close()
	addrs := [2]string{"127.0.0.1:0", "127.0.0.1:0"}
	for round := range 3 {
		pool, err := kv.NewPool(20, 16)
		if err != nil {
			t.Fatal(err)
		}
		pub, replay := listen(t, addrs[0]), listen(t, addrs[1])
		addrs = [2]string{pub.Addr().String(), replay.Addr().String()}
		a := &account{Publisher: New(pub, replay, 16, slog.New(slog.DiscardHandler)), have: map[kv.ContentID]bool{}}
		pool.Watch(a)
		r := rand.New(rand.NewPCG(uint64(round), 1))
		equal := func() {
			t.Helper()
			for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
				s := c.Status("w").Events[0]
				if s.Contents == int64(len(a.have)) && s.Next == a.next && s.Resets == uint64(round) {
					if s.Blocks != s.Contents || s.Tokens != 16*s.Blocks || s.Lost != 0 || s.Unreadable != 0 || s.Unheld != 0 || s.Removed == 0 || int(s.Blocks) != pool.Cached() {
						t.Errorf("%+v of %d cached", s, pool.Cached())
					}
					return
				}
				if time.Now().After(end) {
					t.Fatalf("the pool has %d, number %d; %+v", len(a.have), a.next, s)
				}
			}
		}
		work(t, pool, a, r, 100)
		c.Follow([]collect.Worker{{ID: "w", Events: addrs[0], EventsReplay: addrs[1]}})
		for end := time.Now().Add(patience); len(c.Status("w").Events) == 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("it is not followed")
			}
		}
		equal()
		work(t, pool, a, r, 100)
		equal()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestLibzmqHearsAll has ZeroMQ's own library listen and ask.
func TestLibzmqHearsAll(t *testing.T) {
	python := pythontest.ZMQ(t)
	leaktest.Check(t)
	pool, err := kv.NewPool(20, 16)
	if err != nil {
		t.Fatal(err)
	}
	pub, replay := listen(t, "127.0.0.1:0"), listen(t, "127.0.0.1:0")
	a := &account{Publisher: New(pub, replay, 16, slog.New(slog.DiscardHandler)), have: map[kv.ContentID]bool{}}
	defer a.Close()
	pool.Watch(a)
	sub := exec.Command(python, "-c", `import sys, zmq
s = zmq.Context().socket(zmq.SUB); s.connect(sys.argv[1]); s.setsockopt(zmq.SUBSCRIBE, b"kv-")
f = s.recv_multipart(); print(f[0].decode(), len(f), len(f[1]))`, "tcp://"+pub.Addr().String())
	var out strings.Builder
	sub.Stdout, sub.Stderr = &out, t.Output()
	if err := sub.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- sub.Wait() }()
	r := rand.New(rand.NewPCG(9, 9))
	for heard, end := false, time.Now().Add(patience); !heard; {
		work(t, pool, a, r, 1)
		select {
		case err := <-ended:
			if heard = true; err != nil || out.String() != "kv-events 3 8\n" {
				t.Fatalf("%v: %s", err, out.String())
			}
		case <-time.After(time.Millisecond):
			if time.Now().After(end) {
				_ = sub.Process.Kill()
				t.Fatal("it hears nothing")
			}
		}
	}
	x := pythontest.TallyOf(t, python, replay.Addr().(*net.TCPAddr).Port)
	if len(x.Have) != len(a.have) {
		t.Errorf("%d contents heard, the pool has %d", len(x.Have), len(a.have))
	}
	for id := range a.have {
		if x.Have[fmt.Sprint(id)] != 1 {
			t.Errorf("content %d was not heard", id)
		}
	}
}
