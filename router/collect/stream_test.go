package collect

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headrace/headrace/internal/zmtp"
)

// fake is a publisher of KV events as vLLM's. Its network is in memory, so that its time is the test's.
type fake struct {
	t *testing.T

	mu     sync.Mutex
	seq    uint64
	buffer []fakeBatch // what replay has
	subs   []*zmtp.Conn
	down   bool
	mute   bool // live batches are lost on their way
	most   int  // answers that get through of one replay; 0: all
	stale  bool // replay does not answer
	asked  []uint64
}

type fakeBatch struct {
	seq     uint64
	payload []byte
}

func (p *fake) dial(_ context.Context, addr string) (net.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		return nil, errors.New("connection refused")
	}
	x, y := net.Pipe()
	if strings.HasSuffix(addr, ":1") {
		go p.subscriber(y)
	} else {
		go p.asker(y)
	}
	return x, nil
}

func (p *fake) subscriber(nc net.Conn) {
	defer nc.Close()
	c, err := zmtp.Handshake(nc, "PUB", time.Minute, "SUB")
	if err != nil {
		return
	}
	if f, err := c.Read(100, time.Time{}); err != nil || string(f[0]) != "\x01" {
		p.t.Errorf("subscribes with %q, %v", f, err)
		return
	}
	p.mu.Lock()
	p.subs = append(p.subs, c)
	p.mu.Unlock()
	_, _ = c.Read(100, time.Time{})
}

func (p *fake) asker(nc net.Conn) {
	defer nc.Close()
	c, err := zmtp.Handshake(nc, "ROUTER", time.Minute, "DEALER")
	if err != nil {
		return
	}
	f, err := c.Read(100, time.Time{})
	if err != nil || len(f) != 2 || len(f[0]) != 0 || len(f[1]) != 8 {
		p.t.Errorf("asks %q, %v", f, err)
		return
	}
	from := binary.BigEndian.Uint64(f[1])
	p.mu.Lock()
	buffer, most, stale := slices.Clone(p.buffer), p.most, p.stale
	p.asked = append(p.asked, from)
	p.mu.Unlock()
	if stale {
		_, _ = c.Read(100, time.Time{})
		return
	}
	sent := 0
	for _, b := range buffer {
		if b.seq < from {
			continue
		}
		if sent++; most > 0 && sent > most {
			_, _ = c.Read(100, time.Time{}) // the rest is dropped, and its end too
			return
		}
		if c.Send(nil, []byte("kv"), binary.BigEndian.AppendUint64(nil, b.seq), b.payload) != nil {
			return
		}
	}
	_ = c.Send(nil, nil, []byte(strings.Repeat("\xff", 8)), nil)
}

// publish publishes a batch of events.
func (p *fake) publish(events ...any) {
	p.publishRaw(build(nil, list{float64(time.Now().UnixNano()), events, 0}))
}

func (p *fake) publishRaw(payload []byte) {
	p.mu.Lock()
	subs, seq, mute := slices.Clone(p.subs), p.seq, p.mute
	p.seq++
	p.buffer = append(p.buffer, fakeBatch{seq, payload})
	p.mu.Unlock()
	if !mute {
		for _, c := range subs {
			_ = c.Send([]byte("kv"), binary.BigEndian.AppendUint64(nil, seq), payload)
		}
	}
	synctest.Wait()
}

func (p *fake) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

// die breaks all connections.
func (p *fake) die() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.subs {
		_ = c.Close()
	}
	p.subs = nil
}

// restart makes it another process, of which nobody is told.
func (p *fake) restart() {
	p.die()
	p.set(func() { p.seq, p.buffer = 0, nil })
}

func store(keys ...any) any {
	return []pair{{"type", "BlockStored"}, {"block_hashes", keys}, {"token_ids", list{}}, {"block_size", 16}}
}
func remove(keys ...any) any { return []pair{{"type", "BlockRemoved"}, {"block_hashes", keys}} }

// rig is a collector that follows a fake.
type rig struct {
	*fake
	c *Collector
	r *lockedRecorder
}

type lockedRecorder struct {
	mu sync.Mutex
	recorder
}

func (r *lockedRecorder) Stored(Source, *Stored)   {}
func (r *lockedRecorder) Removed(Source, *Removed) {}
func (r *lockedRecorder) Cleared(Source)           {}
func (r *lockedRecorder) Reset(s Source, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recorder.Reset(s, why)
}
func (r *lockedRecorder) Lost(s Source, n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recorder.Lost(s, n)
}

func (r *lockedRecorder) take() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := strings.Join(r.said, "; ")
	r.said = nil
	return text
}

func inBubble(t *testing.T, f func(t *testing.T, x *rig)) {
	synctest.Test(t, func(t *testing.T) {
		x := &rig{fake: &fake{t: t}, r: &lockedRecorder{}}
		x.c = New(Config{Dial: x.dial, Sink: x.r, Fetch: func(context.Context, string) (io.ReadCloser, error) { return metrics(0) }})
		defer x.c.Close()
		f(t, x)
	})
}

func (x *rig) follow(replay bool) {
	w := Worker{ID: "w", Events: "h:1"}
	if replay {
		w.EventsReplay = "h:2"
	}
	x.c.Follow([]Worker{w})
	synctest.Wait()
}

func (x *rig) events() EventStatus { return x.c.Status("w").Events[0] }

// want holds what is held and what was said since the last time.
func (x *rig) want(t *testing.T, contents int64, said string) {
	t.Helper()
	synctest.Wait()
	e := x.events()
	if got := x.r.take(); e.Contents != contents || e.Tokens != 16*e.Blocks || got != said {
		t.Errorf("%d contents held, want %d; said %q, want %q; %+v", e.Contents, contents, got, said, e)
	}
}

func TestColdStartAndLive(t *testing.T) {
	inBubble(t, func(t *testing.T, x *rig) {
		x.publish(store(1, 2, 3))
		x.publish(remove(2))
		x.follow(true)
		x.want(t, 2, "")
		x.publish(store(4), remove(1))
		x.want(t, 2, "")
		if e := x.events(); e.Next != 3 || e.State != "following" || e.Gaps != 0 || e.Stored != 4 || e.Removed != 2 {
			t.Errorf("%+v", e)
		}
		x.publish(list{"AllBlocksCleared"})
		x.want(t, 0, "")
		x.c.Follow(nil)
		synctest.Wait()
		if s := x.r.take(); s != "reset: it is not followed any more" {
			t.Error(s)
		}
	})
}

// The same content in two blocks is there until both are gone.
func TestContentTwice(t *testing.T) {
	inBubble(t, func(t *testing.T, x *rig) {
		x.follow(true)
		x.publish(store(1), store(1))
		x.want(t, 1, "")
		if e := x.events(); e.Blocks != 2 {
			t.Errorf("%+v", e)
		}
		x.publish(remove(1))
		x.want(t, 1, "")
		x.publish(remove(1))
		x.want(t, 0, "")
		x.publish(remove(1))
		if e := x.events(); e.Unheld != 1 || e.Blocks != 0 {
			t.Errorf("%+v", e)
		}
	})
}

func TestColdStartBehindTheBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T, x *rig) {
		for i := range 5 {
			x.publish(store(i))
		}
		x.set(func() { x.buffer = x.buffer[3:] })
		x.follow(true)
		x.want(t, 2, "lost 3")
	})
}

func TestGaps(t *testing.T) {
	inBubble(t, func(t *testing.T, x *rig) {
		x.follow(true)
		x.publish(store(1))
		x.set(func() { x.mute = true })
		x.publish(store(2))
		x.publish(remove(1))
		x.set(func() { x.mute = false })
		x.publish(store(3))
		x.want(t, 2, "")
		if e := x.events(); e.Gaps != 1 || e.Batches != 4 || e.Lost != 0 {
			t.Errorf("%+v", e)
		}

		// The last ones were lost, and nothing comes behind them.
		x.set(func() { x.mute = true })
		x.publish(store(4))
		x.set(func() { x.mute = false })
		x.want(t, 2, "")
		time.Sleep(idleCheck + time.Second)
		x.want(t, 3, "")

		// What was missed is not in the buffer any more.
		x.set(func() { x.mute = true })
		x.publish(remove(2, 3))
		x.publish(store(5))
		x.set(func() { x.mute, x.buffer = false, x.buffer[6:] })
		x.publish(store(6))
		x.want(t, 2, "reset: the engine is another one, or has forgotten what was missed; lost 6")
	})
}

func TestGapsWithoutReplay(t *testing.T) {
	inBubble(t, func(t *testing.T, x *rig) {
		x.publish(store(0))
		x.follow(false)
		x.publish(store(1))
		x.want(t, 1, "lost 1")
		x.set(func() { x.mute = true })
		x.publish(store(2))
		x.set(func() { x.mute = false })
		x.publish(store(3))
		x.want(t, 1, "reset: batches were missed that cannot be had again; lost 1")
		x.die()
		time.Sleep(time.Second)
		x.want(t, 0, "reset: the connection broke, and it has no replay")
		x.publish(store(4))
		x.want(t, 1, "lost 4")
	})
}

// A broken connection is made up for; another process is seen for what it is, even when it has got further.
func TestReconnects(t *testing.T) {
	for _, further := range []int{0, 1, 2, 3, 7} {
		inBubble(t, func(t *testing.T, x *rig) {
			x.follow(true)
			x.publish(store(1))
			x.publish(store(2))
			x.set(func() { x.down = true })
			x.die()
			x.publish(store(3))
			time.Sleep(time.Minute)
			if e := x.events(); e.Contents != 2 || e.State != "connecting" || e.Problem == "" {
				t.Errorf("%+v", e)
			}
			x.set(func() { x.down = false })
			time.Sleep(reconnectMax * 2)
			x.want(t, 3, "")

			x.restart()
			for i := range further {
				x.publish(store(100 + i))
			}
			time.Sleep(time.Second)
			x.want(t, int64(further), "reset: the engine is another one, or has forgotten what was missed")
			x.publish(store(200))
			x.want(t, int64(further)+1, "")
		})
	}
}

// A ROUTER socket drops what its queue cannot take.
func TestHolesInReplays(t *testing.T) {
	inBubble(t, func(t *testing.T, x *rig) {
		for i := range 95 {
			x.publish(store(i))
		}
		x.set(func() { x.most = 10 })
		x.follow(true)
		time.Sleep(2 * time.Minute)
		x.want(t, 95, "")
	})
}

func TestReplayThatFails(t *testing.T) {
	inBubble(t, func(t *testing.T, x *rig) {
		x.publish(store(1))
		x.set(func() { x.stale = true })
		x.follow(true)
		time.Sleep(time.Minute)
		if e := x.events(); e.State != "following without replay" || e.Problem == "" {
			t.Errorf("%+v", e)
		}
		x.publish(store(2))
		x.want(t, 1, "lost 1")
		x.set(func() { x.stale = false })
		time.Sleep(time.Minute)
		if e := x.events(); e.State != "following" || e.Problem != "" {
			t.Errorf("%+v", e)
		}
		x.want(t, 1, "")
	})
}

// A restart that no connection shows, behind a proxy.
func TestSequenceBeginsAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, x *rig) {
		x.follow(true)
		x.publish(store(1))
		x.publish(store(2))
		x.publish(store(3))
		x.set(func() { x.seq, x.buffer = 0, nil })
		x.publish(store(9))
		x.want(t, 1, "reset: the engine is another one, or has forgotten what was missed")
	})
}

func TestBatchesThatCannotBeRead(t *testing.T) {
	inBubble(t, func(t *testing.T, x *rig) {
		x.follow(true)
		x.publish(store(1))
		x.publishRaw([]byte{5})
		x.want(t, 0, "reset: a batch cannot be read; lost 1")
		x.publish(store(2))
		x.want(t, 1, "")
		x.publishRaw(make([]byte, batchBytesMax+1))
		x.want(t, 0, "reset: a batch cannot be read; lost 1")
		x.publish(store(3))
		x.want(t, 1, "")
		if e := x.events(); e.Unreadable != 2 || e.Next != 5 {
			t.Errorf("%+v", e)
		}
		time.Sleep(time.Minute) // silence, in which the last one is compared
		x.want(t, 1, "")
	})
}

// TestRanks holds that as many publishers are followed as the metrics show ranks.
func TestRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		dialled := map[string]bool{}
		c := New(Config{
			Fetch: func(context.Context, string) (io.ReadCloser, error) {
				return io.NopCloser(strings.NewReader("vllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_running{engine=\"1\"} 0\n")), nil
			},
			Dial: func(_ context.Context, addr string) (net.Conn, error) {
				mu.Lock()
				defer mu.Unlock()
				dialled[addr] = true
				return nil, errors.New("nobody")
			},
		})
		defer c.Close()
		c.Follow([]Worker{{ID: "w", Events: "h:5557", EventsReplay: "h:6557"}})
		time.Sleep(2 * time.Second)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if len(dialled) != 2 || !dialled["h:5557"] || !dialled["h:5558"] {
			t.Errorf("dialled %v", dialled)
		}
		if e := c.Status("w").Events; len(e) != 2 || e[1].Rank != 1 || e[1].Replay != "h:6558" || e[1].Problem != "nobody" {
			t.Errorf("%+v", e)
		}
	})
}

func TestHeldIsBounded(t *testing.T) {
	var h holdings
	for i := range heldMax + 10 {
		h.Stored(Source{}, &Stored{Keys: []Key{Key(i)}, BlockTokens: 1})
	}
	if len(h.set) != heldMax || h.beyond != 10 || h.blocks != heldMax {
		t.Errorf("%d held, %d beyond", len(h.set), h.beyond)
	}
}
