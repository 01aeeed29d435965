package admission

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var errGone = errors.New("gone")

// bench is a Queue without goroutines: who waits is asked, and time stands until it is moved.
type bench struct {
	t *testing.T
	*Queue
	now   time.Time
	quick bool // checks nothing
}

func newBench(t *testing.T, cfg Config) *bench {
	b := &bench{t: t, now: time.Unix(1000, 0)}
	if cfg.WaitingBytes == 0 {
		cfg.WaitingBytes = 1 << 30
	}
	cfg.Now = func() time.Time { return b.now }
	b.Queue = New(cfg)
	return b
}

// enter is Enter without its waiting: nil for who was refused.
func (b *bench) enter(r Request) *waiter {
	b.t.Helper()
	w := &waiter{Request: r, at: b.now, turn: make(chan error, 1)}
	b.note(b.now)
	if b.full(r.Bytes) && !b.makeRoom(&r) {
		return nil
	}
	b.add(w)
	b.serve()
	b.check()
	return w
}

// cancel is what the end of a context does.
func (b *bench) cancel(w *waiter) {
	if w.state == waits {
		w.state = refused
		b.remove(w)
		b.serve()
	}
	b.check()
}

func (b *bench) leave(w *waiter, tokens int64) {
	b.Leave(Pass{w.Places, w.share, w.Tokens}, tokens)
	b.check()
}

// check holds the queue to its bounds, its counts to its lists, and sees that nobody waits for places that are free.
func (b *bench) check() {
	b.t.Helper()
	if b.quick {
		return
	}
	if b.running < 0 || b.running > b.cfg.Places || b.waiting > b.cfg.Waiting || b.bytes > b.cfg.WaitingBytes {
		b.t.Fatalf("%d run, %d wait with %d bytes", b.running, b.waiting, b.bytes)
	}
	waiting, places, bytes := 0, 0, int64(0)
	for i, c := range b.classes {
		if i > 0 && b.classes[i-1].priority >= c.priority || c.line.n == 0 {
			b.t.Fatalf("class %d: out of order, or empty", c.priority)
		}
		n, hold := 0, 0.0
		for w := c.line.head; w != nil; w = w.links[inClass].next {
			if w.state != waits || w.share.class != c || len(w.turn) > 0 {
				b.t.Fatal("who waits is not waiting")
			}
			waiting, places, bytes, n = waiting+1, places+w.Places, bytes+w.Bytes, n+1
			hold += b.hold(w)
		}
		for _, s := range c.turns.items {
			n -= s.line.n
			hold -= s.hold
			if c.shares[s.tenant] != s || c.turns.items[s.at[0]] != s || c.greed.items[s.at[1]] != s {
				b.t.Fatal("a share is not where it thinks")
			}
		}
		if n != 0 || hold > 1e-9 || hold < -1e-9 || len(c.shares) != c.turns.Len()+c.idle.Len() || c.greed.Len() != c.turns.Len() {
			b.t.Fatalf("class %d: the shares have other waiters, by %d and %g", c.priority, n, hold)
		}
	}
	if waiting != b.waiting || places != b.places || bytes != b.bytes {
		b.t.Fatalf("counted %d, %d, %d, but %d, %d, %d wait", b.waiting, b.places, b.bytes, waiting, places, bytes)
	}
	if b.waiting > 0 && b.running+b.nextClass().turns.items[0].line.head.Places <= b.cfg.Places {
		b.t.Fatal("the next waits for places that are free")
	}
}

func TestOrder(t *testing.T) {
	b := newBench(t, Config{Places: 1, Waiting: 64, Aging: 10 * time.Second})
	running := b.enter(Request{Places: 1, Tokens: 1})
	var order []string
	names := map[*waiter]string{}
	put := func(name string, priority int, tenant string, later time.Duration) {
		b.now = b.now.Add(later)
		w := b.enter(Request{Places: 1, Tokens: 100, Priority: priority, Tenant: tenant})
		names[w] = name
	}
	put("a low", 5, "a", 0)
	put("a1", 0, "a", time.Second)
	put("a2", 0, "a", time.Second)
	put("b1", 0, "b", time.Second)
	put("urgent", -5, "a", time.Second)
	put("late urgent", -5, "a", 100*time.Second) // 104 s behind "a low", of 10 priorities' 100
	next := func() string {
		c := b.nextClass()
		w := c.turns.items[0].line.head
		b.leave(running, -1)
		running = w
		return names[w]
	}
	for range 6 {
		order = append(order, next())
	}
	want := []string{"urgent", "a1", "b1", "a2", "a low", "late urgent"}
	if !slices.Equal(order, want) {
		t.Errorf("came in the order %q, want %q", order, want)
	}
}

// TestPriorityStrict: without aging no lower class is ever served before a higher one.
func TestPriorityStrict(t *testing.T) {
	b := newBench(t, Config{Places: 1, Waiting: 1000, Aging: -1})
	rng := rand.New(rand.NewPCG(1, 2))
	running := b.enter(Request{Places: 1, Tokens: 1})
	var waiting []*waiter
	for range 3000 {
		b.now = b.now.Add(time.Duration(rng.IntN(60)) * time.Second)
		if rng.IntN(2) == 0 {
			if w := b.enter(Request{Places: 1, Tokens: 1, Priority: rng.IntN(9) - 4, Tenant: fmt.Sprint(rng.IntN(3))}); w != nil {
				waiting = append(waiting, w)
			}
			continue
		}
		if len(waiting) == 0 {
			continue
		}
		b.leave(running, -1)
		i := slices.IndexFunc(waiting, func(w *waiter) bool { return w.state == granted })
		running = waiting[i]
		waiting = slices.Delete(waiting, i, i+1)
		for _, w := range waiting {
			if w.Priority < running.Priority {
				t.Fatalf("priority %d was served before %d", running.Priority, w.Priority)
			}
		}
	}
}

// TestFair has tenants of several weights with always something waiting, in random sizes and numbers: each gets its share of the
// tokens, though the estimates are wrong.
func TestFair(t *testing.T) {
	weights := map[string]float64{"one": 1, "two": 2, "five": 5, "half": 0.5}
	for seed := range uint64(3) {
		b := newBench(t, Config{Places: 8, Waiting: 1000, Weights: weights})
		b.quick = true
		rng := rand.New(rand.NewPCG(seed, 7))
		var running []*waiter
		actual := map[*waiter]int64{}
		queued := map[string]int{}
		got, total := map[string]float64{}, 0.0
		var waiting []*waiter
		for step := range 5000 {
			for name := range weights {
				for queued[name] < 1+rng.IntN(20) {
					tokens := int64(50 + rng.IntN(4000))
					w := b.enter(Request{Places: 1, Tokens: tokens, Tenant: name})
					actual[w] = tokens/4 + rng.Int64N(2*tokens) // it was only an estimate
					if name == "one" {
						actual[w] = tokens * 3 // and this one cheats
					}
					queued[name]++
					waiting = append(waiting, w)
				}
			}
			waiting = slices.DeleteFunc(waiting, func(w *waiter) bool {
				if w.state != granted {
					return false
				}
				queued[w.Tenant]--
				running = append(running, w)
				return true
			})
			i := rng.IntN(len(running))
			w := running[i]
			running = slices.Delete(running, i, i+1)
			b.leave(w, actual[w])
			if step > 500 {
				got[w.Tenant] += float64(actual[w])
				total += float64(actual[w])
			}
			delete(actual, w)
		}
		for name, weight := range weights {
			want := weight / 8.5
			if share := got[name] / total; share < 0.95*want || share > 1.05*want {
				t.Errorf("seed %d: %s got %.4f of the tokens, want %.4f", seed, name, share, want)
			}
		}
	}
}

// TestRoom: who is displaced when the room to wait is full.
func TestRoom(t *testing.T) {
	b := newBench(t, Config{Places: 1, Waiting: 4, WaitingBytes: 1000})
	b.enter(Request{Places: 1, Tokens: 1})
	req := func(priority int, tenant string, bytes int64) Request {
		return Request{Places: 1, Tokens: 1, Priority: priority, Tenant: tenant, Bytes: bytes}
	}
	a1, a2, a3, l := b.enter(req(0, "a", 100)), b.enter(req(0, "a", 100)), b.enter(req(0, "a", 100)), b.enter(req(1, "b", 100))
	if b.enter(req(1, "b", 1)) != nil {
		t.Error("displaced one of its own kind")
	}
	if b.enter(req(2, "c", 1)) != nil {
		t.Error("displaced one of higher priority")
	}
	b1 := b.enter(req(0, "b", 100))
	if b1 == nil || l.state != refused {
		t.Fatal("the lowest priority was not displaced")
	}
	var e *Refusal
	if err := <-l.turn; !errors.As(err, &e) || e.Why != Displaced || e.RetryAfter < time.Second {
		t.Errorf("it was told %v", err)
	}
	if b2 := b.enter(req(0, "b", 100)); b2 == nil || a3.state != refused || a2.state != waits {
		t.Error("the greediest tenant's newest was not displaced")
	}
	if b.enter(req(0, "b", 100)) != nil {
		t.Error("displaced one who holds no more than itself")
	}
	if b.enter(req(-1, "c", 950)) == nil || b.waiting != 1 {
		t.Errorf("%d wait beside a large one", b.waiting)
	}
	if b.enter(req(-2, "c", 1001)) != nil || b.waiting != 1 {
		t.Error("something was displaced for what can never wait")
	}
	if a1.state != refused {
		t.Error("the large one has no room")
	}
}

func TestRetryAfter(t *testing.T) {
	b := newBench(t, Config{Places: 1, Waiting: 20})
	running := b.enter(Request{Places: 1, Tokens: 1})
	ask := func(want time.Duration) {
		t.Helper()
		if got := b.retryAfter(b.now, 1); got != want {
			t.Errorf("told to come back in %s, want %s", got, want)
		}
	}
	var all []*waiter
	for range 20 {
		all = append(all, b.enter(Request{Places: 1, Tokens: 1}))
	}
	ask(time.Second) // nothing is known yet
	b.now = b.now.Add(20 * time.Second)
	ask(time.Minute) // nothing came out
	for range 9 {
		b.leave(running, -1)
		running, all = all[0], all[1:]
	}
	ask(24 * time.Second) // 12 places at 10 in 20 s
	for range 11 {
		b.leave(running, -1)
		running, all = all[0], all[1:]
	}
	ask(time.Second)
}

// TestRandom does what happens to a queue in random order: bench checks it behind each step.
func TestRandom(t *testing.T) {
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		b := newBench(t, Config{Places: 1 + rng.IntN(8), Waiting: 1 + rng.IntN(30), WaitingBytes: 1000, Weights: map[string]float64{"0": 3}})
		var waiting, running []*waiter
		for range 2000 {
			b.now = b.now.Add(time.Duration(rng.IntN(3000)) * time.Millisecond)
			switch rng.IntN(5) {
			case 0, 1, 2:
				r := Request{Places: 1 + rng.IntN(b.cfg.Places), Bytes: rng.Int64N(400), Tokens: 1 + rng.Int64N(50), Priority: rng.IntN(5) - 2, Tenant: fmt.Sprint(rng.IntN(4))}
				if w := b.enter(r); w != nil {
					waiting = append(waiting, w)
				}
			case 3:
				if len(waiting) > 0 {
					b.cancel(waiting[rng.IntN(len(waiting))])
				}
			default:
				if len(running) > 0 {
					i := rng.IntN(len(running))
					w := running[i]
					running = slices.Delete(running, i, i+1)
					b.leave(w, rng.Int64N(200)-100)
				}
			}
			waiting = slices.DeleteFunc(waiting, func(w *waiter) bool {
				if w.state == granted {
					running = append(running, w)
				}
				return w.state != waits
			})
		}
		for len(running) > 0 {
			b.leave(running[0], 1)
			running = running[1:]
			waiting = slices.DeleteFunc(waiting, func(w *waiter) bool {
				if w.state == granted {
					running = append(running, w)
				}
				return w.state == granted
			})
		}
		if len(waiting) > 0 || b.running != 0 || b.waiting != 0 || b.bytes != 0 || b.places != 0 || len(b.classes) > 0 {
			t.Fatalf("seed %d: %d wait, %+v is left", seed, len(waiting), b.Counts())
		}
	}
}

// TestWaiting waits for real: turns, patience, contexts.
func TestWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(Config{Places: 1, Waiting: 2, WaitingBytes: 100, Patience: time.Minute})
		p, err := q.Enter(t.Context(), Request{Places: 3})
		if err != nil || q.Counts().Running != 1 {
			t.Fatal(err, q.Counts())
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		errs := make(chan error, 2)
		for range 2 {
			go func() {
				p, err := q.Enter(ctx, Request{Places: 1, Tokens: 10})
				if err == nil {
					q.Leave(p, 10)
				}
				errs <- err
			}()
			synctest.Wait()
			time.Sleep(time.Second)
		}
		var e *Refusal
		if _, err := q.Enter(ctx, Request{Places: 1}); !errors.As(err, &e) || e.Why != Full || e.RetryAfter < time.Second {
			t.Errorf("a third: %v", err)
		}
		if c := q.Counts(); c.Waiting != 2 || c.OldestMS != 2000 || c.Tenants != 1 {
			t.Errorf("%+v", c)
		}
		time.Sleep(58500 * time.Millisecond)
		if err := <-errs; !errors.As(err, &e) || e.Why != Late || e.Waited != time.Minute {
			t.Errorf("the first: %v", err)
		}
		cancel(errGone)
		if err := <-errs; !errors.Is(err, errGone) {
			t.Errorf("the second: %v", err)
		}
		q.Leave(p, -1)
		if c := q.Counts(); c != (Counts{}) {
			t.Errorf("%+v is left", c)
		}
	})
}

// TestTurns has many goroutines come, wait, leave and go: no turn is lost, or the test hangs.
func TestTurns(t *testing.T) {
	q := New(Config{Places: 3, Waiting: 10, WaitingBytes: 1000})
	var wg sync.WaitGroup
	var mu sync.Mutex
	running := 0
	for g := range 16 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 3))
			for range 300 {
				ctx, cancel := context.WithCancelCause(context.Background())
				if rng.IntN(3) == 0 {
					go cancel(errGone)
				}
				n := 1 + rng.IntN(3)
				p, err := q.Enter(ctx, Request{Places: n, Bytes: 50, Tokens: 1 + rng.Int64N(9), Priority: rng.IntN(3), Tenant: fmt.Sprint(g % 4)})
				if err == nil {
					mu.Lock()
					if running += n; running > 3 {
						t.Errorf("%d run", running)
					}
					running -= n
					mu.Unlock()
					q.Leave(p, rng.Int64N(9))
				}
				cancel(nil)
			}
		})
	}
	wg.Wait()
	if c := q.Counts(); c != (Counts{}) {
		t.Errorf("%+v is left", c)
	}
}

// BenchmarkAdmission is what a request pays where nobody waits, and where 512 of 64 tenants do.
func BenchmarkAdmission(b *testing.B) {
	b.Run("free", func(b *testing.B) {
		q := New(Config{Places: 512, Waiting: 512, WaitingBytes: 1 << 30})
		b.ReportAllocs()
		for b.Loop() {
			p, _ := q.TryEnter(1)
			q.Leave(p, -1)
		}
	})
	b.Run("full", func(b *testing.B) {
		q := New(Config{Places: 1, Waiting: 1 << 20, WaitingBytes: 1 << 40})
		q.running = 1
		var names [64]string
		for i := range names {
			names[i] = fmt.Sprint(i)
		}
		put := func(i int) {
			w := &waiter{Request: Request{Places: 1, Bytes: 1000, Tokens: 100, Priority: i % 3, Tenant: names[i%64]}, at: time.Now(), turn: make(chan error, 1)}
			q.mu.Lock()
			q.add(w)
			q.mu.Unlock()
		}
		for i := range 512 {
			put(i)
		}
		b.ReportAllocs()
		i := 0
		for b.Loop() {
			put(i)
			i++
			q.Leave(Pass{places: 1}, -1)
		}
	})
}
