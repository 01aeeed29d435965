package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/headrace/headrace/internal/registry"
)

// tinyModel4 is a small model with four KV heads, so that up to four ranks can share them.
var tinyModel4File = sync.OnceValues(func() (string, error) {
	exe, err := binary()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(scratch, "heads4")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "tiny.gguf") // clients call it as they do the other
	if out, err := exec.Command(exe, "tinymodel", "--seed", "4", "--kv-heads", "4", "--out", path).CombinedOutput(); err != nil {
		return "", fmt.Errorf("make the model of four KV heads: %w\n%s", err, out)
	}
	return path, nil
})

func tinyModel4(t testing.TB) string {
	t.Helper()
	path, err := tinyModel4File()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// shape is how a worker lays its KV cache out.
type shape struct{ tp, blockTokens int }

func (s shape) String() string { return fmt.Sprintf("TP %d of %d tokens", s.tp, s.blockTokens) }

// couple is two workers of a model name of their own. Both prefill and decode, so the router uses them in both
// directions, in turn.
type couple struct {
	c      *cluster
	model  string
	shapes [2]shape
}

// couples are the pairs of shapes: each tensor-parallel degree with each other one, in both ways with both block sizes.
func couples() [][2]shape {
	out := [][2]shape{
		{{1, 16}, {2, 64}}, {{1, 64}, {2, 16}}, {{1, 16}, {4, 64}}, {{1, 64}, {4, 16}}, {{2, 16}, {4, 64}}, {{2, 64}, {4, 16}}, {{1, 16}, {1, 64}},
	}
	if full {
		out = append(out, [2]shape{{2, 16}, {2, 64}}, [2]shape{{4, 16}, {4, 64}}, [2]shape{{1, 16}, {2, 16}}, [2]shape{{1, 64}, {4, 64}},
			[2]shape{{2, 16}, {4, 16}}, [2]shape{{4, 128}, {2, 1}}, [2]shape{{1, 7}, {4, 24}})
	}
	return out
}

// TestShards: what prefill, transfer and decode give is what the whole engine gives, whatever the block sizes and
// tensor-parallel degrees of the two sides.
func TestShards(t *testing.T) {
	needAll(t)
	c := start(t, options{model: tinyModel4(t), nodes: 2, args: []string{
		"--prefill-tp", "2", "--prefill-block-tokens", "64", "--decode-tp", "4", "--decode-block-tokens", "16",
	}})
	o := oracleFor(t, tinyModel4(t))
	t.Run("up", func(t *testing.T) { upWithShapes(t, c, o) })
	for _, nodes := range []int{1, 2} {
		transport := map[int]string{1: "shm", 2: "tcp"}[nodes]
		t.Run(transport, func(t *testing.T) {
			c.in(t)
			var all []*couple
			for i, shapes := range couples() {
				p := &couple{c: c, model: fmt.Sprintf("%s-%d", transport, i), shapes: shapes}
				for side, s := range shapes {
					c.addWorker(fmt.Sprintf("%s-%d", p.model, side), p.model, s, side*(nodes-1))
				}
				all = append(all, p)
			}
			for _, p := range all {
				t.Run(fmt.Sprintf("%v and %v", p.shapes[0], p.shapes[1]), func(t *testing.T) { p.test(t, o) })
			}
			for _, n := range c.view().Nodes[:nodes] { // each has sent
				c.sentOver(t, node{n}, transport)
			}
		})
	}
}

// addWorker starts a worker beside those of up. It goes away with the test.
func (c *cluster) addWorker(id, model string, s shape, node int) {
	c.t.Helper()
	log, err := os.Create(filepath.Join(c.dir, id+".log"))
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(bin(c.t), "worker", "--model", tinyModel4(c.t), "--model-name", model, "--id", id, "--etcd", c.ready.Etcd,
		"--socket", filepath.Join(c.data, "run", fmt.Sprintf("node-%d.sock", node)), "--threads", "1", "--kv-memory", "32MiB",
		"--tensor-parallel", fmt.Sprint(s.tp), "--block-tokens", fmt.Sprint(s.blockTokens))
	cmd.Env, cmd.Stdout, cmd.Stderr = c.environ(), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGINT)
		if err := cmd.Wait(); err != nil {
			c.t.Errorf("worker %s: %v", id, err)
		}
	})
}

// workers waits until both are there and the router knows it.
func (p *couple) workers() (out [2]worker) {
	p.c.t.Helper()
	eventually(p.c.t, waitHang, "workers of "+p.model, func() error {
		v := p.c.view()
		for i, s := range p.shapes {
			w, ok := v.Worker(fmt.Sprintf("%s-%d", p.model, i))
			if !ok || w.NodeData == "" {
				return fmt.Errorf("worker %d is %+v", i, w)
			}
			if int(w.TensorParallel) != s.tp || int(w.BlockTokens) != s.blockTokens {
				p.c.t.Fatalf("worker %s is listed with TP %d of %d tokens, want %v", w.ID, w.TensorParallel, w.BlockTokens, s)
			}
			out[i] = worker{w}
		}
		return nil
	})
	p.c.routed()
	return out
}

func (p *couple) test(t *testing.T, o *oracle) {
	p.c.in(t)
	workers := p.workers()
	p.equal(t, o, 1, p.fresh()...)
	// Both know the prefix, to whole blocks of their own.
	shared := freshPrompt(200)
	p.equal(t, o, 1, request{Prompt: shared, MaxTokens: 6}, request{Prompt: append(shared[:190:190], freshPrompt(9)...), MaxTokens: 6})
	p.equal(t, o, 1, p.following(shared)...)
	// Only one of them does.
	for _, w := range workers {
		known := freshPrompt(150)
		whole := request{Prompt: known, MaxTokens: 4}
		want := o.want(t, whole)
		whole.Model = p.model
		mustEqual(t, ask(w.url(), whole), want, "whole at "+w.ID)
		p.equal(t, o, 1, p.following(known)...)
	}
	p.equal(t, o, 8, p.fresh()...)
	for i, w := range workers {
		st, err := w.status()
		if err != nil {
			t.Fatal(err)
		}
		if st.Counters.ExternalHits == 0 || st.Counters.PrefixHits == 0 {
			t.Errorf("%v took nothing from %v, or found no prefix: %+v", p.shapes[i], p.shapes[1-i], st.Counters)
		}
	}
}

// fresh are prompts around the borders of blocks, each length twice, for the two directions.
func (p *couple) fresh() (out []request) {
	sizes := []int{1, 16, 17, 63, 64, 65, 130, 300}
	if full {
		sizes = lengths[:40]
	}
	for i, n := range sizes {
		for k := range 2 {
			out = append(out, sampled(request{Prompt: freshPrompt(n), MaxTokens: 5 + i%7, Stream: k == 0}, i))
		}
	}
	return out
}

// following are prompts that begin with known tokens, two of each for the two directions.
func (p *couple) following(known []int32) (out []request) {
	for i, n := range []int{16, 64, 100, len(known)} {
		for k := range 2 {
			prompt := append(append([]int32(nil), known[:n]...), freshPrompt(1+7*i)...)
			out = append(out, sampled(request{Prompt: prompt, MaxTokens: 6, Stream: k == 0}, i))
		}
	}
	return out
}

// equal sends requests, so many at a time, and wants the whole engine's answers by way of two leases each that settle.
func (p *couple) equal(t *testing.T, o *oracle, width int, requests ...request) {
	t.Helper()
	for _, r := range requests {
		o.want(t, r)
	}
	before, _ := p.c.moved()
	answers := make([]*answer, len(requests))
	atOnce(len(requests), width, func(i int) {
		r := requests[i]
		r.Model = p.model
		answers[i] = ask(p.c.url(), r)
	})
	for i, a := range answers {
		mustEqual(t, a, o.want(t, requests[i]), fmt.Sprintf("prompt of %d tokens: %s", len(requests[i].Prompt), brief(requests[i])))
	}
	p.c.blocksBack(waitShort, "after requests")
	if after, _ := p.c.moved(); after-before != uint64(2*len(requests)) {
		t.Errorf("%d leases settled for %d requests, want one at either end of each", after-before, len(requests))
	}
}

// sentOver checks that a daemon has sent KV by a transport.
func (c *cluster) sentOver(t *testing.T, n node, transport string) {
	t.Helper()
	st, err := n.status()
	if err != nil {
		t.Fatal(err)
	}
	for _, ch := range st.Channels {
		if ch.Transport == transport && ch.BytesSent > 0 {
			return
		}
	}
	t.Errorf("node %s sent nothing over %s: channels %+v", n.ID, transport, st.Channels)
}

// upWithShapes is `headrace up` with options for the two sides: 2 ranks of 64-token blocks to 4 ranks of 16-token ones.
func upWithShapes(t *testing.T, c *cluster, o *oracle) {
	c.in(t)
	for role, want := range map[string]shape{registry.RolePrefill: {2, 64}, registry.RoleDecode: {4, 16}} {
		if w := c.workerOf(role); int(w.TensorParallel) != want.tp || int(w.BlockTokens) != want.blockTokens {
			t.Errorf("%s is listed with TP %d of %d tokens, want %v", w.ID, w.TensorParallel, w.BlockTokens, want)
		}
	}
	perToken := c.perToken(t)
	for i, n := range []int{2, 15, 16, 64, 65, 200, 700} {
		r := sampled(request{Prompt: freshPrompt(n), MaxTokens: 8, Stream: i%2 == 0}, i)
		_, before := c.moved()
		mustEqual(t, ask(c.url(), r), o.want(t, r), fmt.Sprintf("prompt of %d tokens", n))
		c.blocksBack(waitShort, "after an answer")
		if _, after := c.moved(); after-before != perToken*uint64(n) {
			t.Errorf("prompt of %d tokens: %d bytes landed, want %d a token: each head of each rank once", n, after-before, perToken)
		}
	}
	// D knows whole blocks of 16 tokens, and only what lies behind them is moved, out of P's blocks of 64.
	known := freshPrompt(100)
	r := request{Prompt: known, MaxTokens: 4}
	mustEqual(t, ask(c.decode().url(), r), o.want(t, r), "whole at decode")
	r.Prompt = append(known, freshPrompt(30)...)
	_, before := c.moved()
	mustEqual(t, ask(c.url(), r), o.want(t, r), "a prefix that decode knows")
	c.blocksBack(waitShort, "after a prefix hit")
	if _, after := c.moved(); after-before != perToken*(130-96) {
		t.Errorf("%d bytes landed, want those of 34 tokens of %d", after-before, perToken)
	}
	equalAtOnce(t, c, o, []request{mixed(70_000, 10), mixed(70_000, 20), mixed(70_000, 21), mixed(70_000, 30), mixed(70_000, 33)})
	for _, point := range []string{"write.frame", "read.frame"} { // a client leaves with pieces of several ranks on their way
		n := c.nodeOf(c.prefill())
		if point == "read.frame" {
			n = c.nodeOf(c.decode())
		}
		n.pause(t, point, 1)
		st := post(c.url(), request{Prompt: freshPrompt(400), MaxTokens: 8, Stream: true})
		n.held(t, point)
		st.hangUp()
		c.blocksBack(waitShort, "after a client left")
		if err := n.release(); err != nil {
			t.Error(err)
		}
		c.split(waitShort)
	}
}

// TestShardsSmolLM2 is the same with the default model, whose three KV heads three ranks can share and two cannot.
func TestShardsSmolLM2(t *testing.T) {
	needAll(t)
	model := smolModel(t)
	o := oracleFor(t, model)
	c := start(t, options{model: model, nodes: 2, args: []string{"--prefill-tp", "3", "--decode-block-tokens", "64"}})
	for i, text := range []string{"Why does water fall?", strings.Repeat("The miller opens the gate when the grain is dry. ", 20)} {
		r := sampled(request{Model: c.prefill().Model, Chat: text, MaxTokens: 12, Stream: i == 0}, i)
		settled, _ := c.moved()
		mustEqual(t, ask(c.url(), r), o.want(t, r), fmt.Sprintf("chat %d", i))
		c.blocksBack(waitShort, "after an answer")
		if after, _ := c.moved(); after-settled != 2 {
			t.Errorf("chat %d: %d leases settled, want one at either end", i, after-settled)
		}
	}
	out, err := exec.Command(bin(t), "worker", "--model", model, "--tensor-parallel", "2", "--listen", "127.0.0.1:0").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "3 key heads do not divide evenly among 2 shards") {
		t.Errorf("two ranks for three KV heads: %v: %s", err, out)
	}
}
