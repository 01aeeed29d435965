package collect

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/leaktest"
	"github.com/headrace/headrace/internal/pythontest"
)

const patience = 30 * time.Second

// publisher is pythontest.Publisher and what its events come to.
type publisher struct {
	t           *testing.T
	python      string
	pub, replay int
	buffer      int

	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	have map[uint64]int // blocks by content
	rand *rand.Rand

	tokens uint32 // of a block; 16
}

// freePorts are n ports in a row that nobody has.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	for range 100 {
		first := 20000 + rand.IntN(10000)
		free := true
		for i := range n {
			ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(first+i)))
			if err != nil {
				free = false
				break
			}
			defer ln.Close()
		}
		if free {
			return first
		}
	}
	t.Fatal("no free ports")
	return 0
}

// start starts a process, which has nothing of the one before.
func (p *publisher) start() {
	p.t.Helper()
	p.cmd = pythontest.Publisher(p.python, p.pub, p.replay, p.buffer)
	p.cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	p.cmd.Stderr = p.t.Output()
	in, err := p.cmd.StdinPipe()
	out, err2 := p.cmd.StdoutPipe()
	if err := errors.Join(err, err2, p.cmd.Start()); err != nil {
		p.t.Fatal(err)
	}
	p.in, p.out, p.have = in, bufio.NewReader(out), map[uint64]int{}
	p.ok()
}

func (p *publisher) ok() {
	p.t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "ok ") {
		p.t.Fatalf("the publisher says %q, %v", line, err)
	}
}

// kill is kill -9.
func (p *publisher) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// publish publishes n batches of what an engine does: it stores, and lets go. Every other batch has maps for events.
func (p *publisher) publish(n int, mute bool) {
	p.t.Helper()
	order := struct {
		Batches [][]any `json:"batches"`
		Mute    bool    `json:"mute"`
	}{Mute: mute}
	for i := range n {
		var events []any
		for range 1 + p.rand.IntN(3) {
			events = append(events, p.event(i%2 == 0))
		}
		order.Batches = append(order.Batches, events)
	}
	b, err := json.Marshal(order)
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.in.Write(append(b, '\n')); err != nil {
		p.t.Fatal(err)
	}
	p.ok()
}

func (p *publisher) event(asMap bool) any {
	hashes := []uint64{}
	if p.rand.IntN(3) == 0 {
		for k, n := range p.have { // of any order
			hashes = append(hashes, k)
			if p.have[k] = n - 1; n == 1 {
				delete(p.have, k)
			}
			if len(hashes) == 3 {
				break
			}
		}
		if asMap {
			return map[string]any{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
		}
		return []any{"BlockRemoved", hashes, "GPU"}
	}
	tokens := []int{}
	for range 1 + p.rand.IntN(8) {
		k := p.rand.Uint64N(5000) << 50
		p.have[k]++
		hashes = append(hashes, k)
		for range 16 {
			tokens = append(tokens, p.rand.IntN(150000))
		}
	}
	if asMap {
		return map[string]any{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": nil, "token_ids": tokens, "block_size": 16, "lora_id": nil, "medium": "GPU", "kv_cache_spec_kind": "full_attention"}
	}
	return []any{"BlockStored", hashes, nil, tokens, 16, nil, "GPU"}
}

// equal waits until the collector holds exactly what the publisher has.
func (p *publisher) equal(c *Collector, rank int) {
	p.t.Helper()
	why := ""
	for end := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		f := (*c.followers.Load())["w"]
		if streams := f.streams.Load(); streams != nil && len(*streams) > rank {
			if why = p.differs((*streams)[rank].held); why == "" {
				return
			}
		}
		if time.Now().After(end) {
			p.t.Fatalf("%s; %+v", why, c.Status("w"))
		}
	}
}

func (p *publisher) differs(h *holdings) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.set) != len(p.have) {
		return fmt.Sprintf("%d contents held, the publisher has %d", len(h.set), len(p.have))
	}
	for k, n := range p.have {
		if x := h.set[blockID{key: Key(k)}]; int(x.blocks) != n || x.tokens != cmp.Or(p.tokens, 16) {
			return fmt.Sprintf("%d blocks of content %x held, the publisher has %d", x.blocks, k, n)
		}
	}
	return ""
}

// TestLibzmq follows a publisher over the ZeroMQ that engines use.
func TestLibzmq(t *testing.T) {
	python := pythontest.ZMQ(t)
	leaktest.Check(t)
	ports := freePorts(t, 4)
	var ranks []*publisher
	for i := range 2 {
		p := &publisher{t: t, python: python, pub: ports + i, replay: ports + 2 + i, buffer: 10000, rand: rand.New(rand.NewPCG(1, uint64(i)))}
		p.start()
		t.Cleanup(func() { p.kill() })
		p.publish(50, false) // before anybody listens
		ranks = append(ranks, p)
	}
	c := New(Config{Fetch: func(context.Context, string) (io.ReadCloser, error) {
		return io.NopCloser(strings.NewReader("vllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_running{engine=\"1\"} 0\n")), nil
	}})
	defer c.Close()
	c.Follow([]Worker{{ID: "w", Events: fmt.Sprintf("127.0.0.1:%d", ports), EventsReplay: fmt.Sprintf("127.0.0.1:%d", ports+2)}})
	for i, p := range ranks {
		p.equal(c, i)
	}
	p := ranks[0]
	status := func() EventStatus { return c.Status("w").Events[0] }
	p.publish(500, false)
	p.equal(c, 0)
	if s := status(); s.Lost != 0 || s.Resets != 0 || s.Unreadable != 0 || s.Unheld != 0 {
		t.Errorf("%+v", s)
	}
	gaps := status().Gaps
	p.publish(20, true)
	p.publish(1, false)
	p.equal(c, 0)
	if s := status(); s.Gaps != gaps+1 || s.Lost != 0 {
		t.Errorf("behind a gap: %+v", s)
	}

	// More than a ROUTER's queue takes, all of it missed.
	p.publish(6000, true)
	p.publish(1, false)
	p.equal(c, 0)
	if s := status(); s.Lost != 0 || s.Resets != 0 {
		t.Errorf("behind a long gap: %+v", s)
	}

	// Another process at the same addresses, first behind what was heard, then beyond it.
	for round, n := range []int{10, 7000} {
		p.kill()
		p.start()
		p.publish(n, false)
		p.equal(c, 0)
		if s := status(); s.Lost != 0 || s.Resets != uint64(round+1) {
			t.Errorf("behind a restart: %+v", s)
		}
	}
	ranks[1].publish(5, false)
	ranks[1].equal(c, 1)
	if s := c.Status("w").Events[1]; s.Resets != 0 || s.Lost != 0 {
		t.Errorf("the other rank: %+v", s)
	}
}

// TestLibzmqWithAShortMemory holds that a gap that cannot be closed leaves nothing wrong behind.
func TestLibzmqWithAShortMemory(t *testing.T) {
	python := pythontest.ZMQ(t)
	leaktest.Check(t)
	ports := freePorts(t, 2)
	p := &publisher{t: t, python: python, pub: ports, replay: ports + 1, buffer: 50, rand: rand.New(rand.NewPCG(2, 2))}
	p.start()
	t.Cleanup(func() { p.kill() })
	c := New(Config{Fetch: func(context.Context, string) (io.ReadCloser, error) { return metrics(0) }})
	defer c.Close()
	c.Follow([]Worker{{ID: "w", Events: fmt.Sprintf("127.0.0.1:%d", ports), EventsReplay: fmt.Sprintf("127.0.0.1:%d", ports+1)}})
	p.publish(30, false)
	p.equal(c, 0)
	p.publish(200, true)
	p.publish(1, false)
	f := (*c.followers.Load())["w"]
	for end := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		if s := c.Status("w").Events[0]; s.Next == 231 {
			if s.Resets != 1 || s.Lost != 231-50 {
				t.Errorf("%+v", s)
			}
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%+v", c.Status("w"))
		}
	}
	h := (*f.streams.Load())[0].held
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, x := range h.set {
		if int(x.blocks) > p.have[uint64(id.key)] {
			t.Errorf("%d blocks of content %x held, the publisher has %d", x.blocks, id.key, p.have[uint64(id.key)])
		}
	}
	if len(h.set) == 0 {
		t.Error("nothing is held")
	}
}
