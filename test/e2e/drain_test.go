package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
)

// drainLoad keeps streams open through a router until it is ended. Each answer must come whole.
type drainLoad struct {
	url   string
	whole atomic.Int64
	stop  context.CancelFunc
	ctx   context.Context
	done  sync.WaitGroup

	mu     sync.Mutex
	failed []string // the first few
}

// startDrainLoad begins n streams, which begin anew when they have ended.
func startDrainLoad(url string, n int) *drainLoad {
	l := &drainLoad{url: url}
	l.ctx, l.stop = context.WithCancel(context.Background())
	for i := range n {
		l.done.Go(func() {
			rng := rand.New(rand.NewPCG(11, uint64(i)))
			for k := 0; l.ctx.Err() == nil; k++ {
				r := request{Model: "stand-in", Chat: fmt.Sprintf("request %d of client %d", k, i), MaxTokens: 10 + rng.IntN(30), Stream: true}
				a := ask(l.url, r)
				if a.Done && a.Error == nil && a.Broken == nil && len(a.Wrong) == 0 && len(a.Tokens) == r.MaxTokens {
					l.whole.Add(1)
					continue
				}
				l.mu.Lock()
				if len(l.failed) < 5 {
					l.failed = append(l.failed, fmt.Sprintf("client %d, request %d of %d tokens: %s", i, k, r.MaxTokens, a.outcome()))
				}
				l.mu.Unlock()
			}
		})
	}
	return l
}

// end lets the streams end and says how many answers came whole. Any other fails the test.
func (l *drainLoad) end(t *testing.T) int64 {
	t.Helper()
	l.stop()
	l.done.Wait()
	for _, f := range l.failed {
		t.Error(f)
	}
	return l.whole.Load()
}

// generated is how many tokens a worker has computed, of prompts and of answers.
func generated(w registry.Worker) (int64, error) {
	resp, err := soakAdmin.Get("http://" + w.Addr + "/metrics")
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	sum, said := int64(0), 0
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), "} ")
		if strings.HasPrefix(name, "vllm:generation_tokens_total{") || strings.HasPrefix(name, "vllm:prompt_tokens_total{") {
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, err
			}
			sum, said = sum+int64(n), said+1
		}
	}
	if said != 2 {
		return 0, errors.New("it does not say how many tokens it has computed")
	}
	return sum, nil
}

// more waits until a worker has made so many tokens more than that.
func more(t *testing.T, w registry.Worker, than, n int64) {
	t.Helper()
	eventually(t, waitHang, w.ID+" makes tokens", func() error {
		now, err := generated(w)
		if err == nil && now < than+n {
			err = fmt.Errorf("%d, it had %d", now, than)
		}
		return err
	})
}

// TestDrain drains a decode and then a prefill worker under load, by the command: it returns when the worker has nothing left, no request is
// lost, the worker gets none meanwhile, and gets some again when the drain is taken back.
func TestDrain(t *testing.T) {
	needAll(t)
	streams := 24
	if full {
		streams = 400
	}
	c := standins(t, soak{streams: streams, rate: 40})
	command := func(args ...string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, bin(t), append([]string{"drain", "--etcd", c.ready.Etcd, "--data-dir", c.data}, args...)...)
		cmd.Env = c.environ()
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("headrace drain %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	load := startDrainLoad(c.ready.URL, streams)
	ended := sync.OnceValue(func() int64 { return load.end(t) })
	defer ended()
	for _, role := range []string{registry.RoleDecode, registry.RolePrefill} {
		var w, other registry.Worker
		for _, x := range c.view().Workers {
			if x.Role == role {
				w, other = x, w
			}
		}
		more(t, w, 0, 20)
		more(t, other, 0, 20)
		command(w.ID, "--timeout", "90s")
		before, err := generated(w)
		if err != nil {
			t.Fatal(err)
		}
		others, err := generated(other)
		if err != nil {
			t.Fatal(err)
		}
		more(t, other, others, 20*int64(streams)) // in which time it would get some
		if after, err := generated(w); err != nil || after != before {
			t.Errorf("%s has made %d tokens since the command said that it has nothing left (%v)", w.ID, after-before, err)
		}
		command(w.ID, "--undo")
		more(t, w, before, 20)
	}
	if n := ended(); n < int64(streams) {
		t.Errorf("%d answers", n)
	} else {
		t.Logf("%d answers, all whole", n)
	}
}
