package served

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
)

// request is a completion of token ids.
type request struct {
	prompt []int32
	max    int
	seed   uint64 // 0: the likeliest token each time
	stream bool
}

// tokens is a prompt of so many tokens, the same for the same seed. The small model has more than 100 of them.
func tokens(seed uint64, n int) []int32 {
	r := rand.New(rand.NewPCG(seed, 1))
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(3 + r.IntN(97))
	}
	return out
}

func (r request) body() []byte {
	m := map[string]any{"model": "tiny", "prompt": r.prompt, "max_tokens": r.max, "temperature": 0, "ignore_eos": true, "return_token_ids": true, "stream": r.stream}
	if r.seed != 0 {
		m["temperature"], m["top_p"], m["seed"] = 0.9, 0.95, r.seed
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // numbers and strings can be marshalled
	}
	return b
}

type answer struct {
	Choices []struct {
		Tokens []int32 `json:"token_ids"`
		Finish string  `json:"finish_reason"`
	} `json:"choices"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// send posts a request and gives the body of its answer.
func send(ctx context.Context, base string, r request) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/completions", bytes.NewReader(r.body()))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000)) // it only explains
		return nil, fmt.Errorf("answered %s: %s", resp.Status, text)
	}
	return resp.Body, nil
}

// ask gives the tokens of an answer.
func ask(base string, r request) ([]int32, error) {
	ctx, cancel := context.WithTimeout(context.Background(), waitLong)
	defer cancel()
	body, err := send(ctx, base, r)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	if r.stream {
		return readStream(body)
	}
	var a answer
	if err := json.NewDecoder(body).Decode(&a); err != nil {
		return nil, err
	}
	if a.Error != nil || len(a.Choices) != 1 {
		return nil, fmt.Errorf("answered %+v", a)
	}
	return a.Choices[0].Tokens, nil
}

func readStream(r io.Reader) (got []int32, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			return got, nil
		}
		var a answer
		if err := json.Unmarshal([]byte(data), &a); err != nil {
			return got, err
		}
		if a.Error != nil {
			return got, fmt.Errorf("in the stream: %s", a.Error.Message)
		}
		for _, c := range a.Choices {
			got = append(got, c.Tokens...)
		}
	}
	if err := lines.Err(); err != nil {
		return got, err
	}
	return got, io.ErrUnexpectedEOF
}

// right asks the router and the reference worker, which makes the whole answer itself.
func (c *cluster) right(what string, r request) {
	c.t.Helper()
	want, err := ask(oracle, r)
	if err != nil {
		c.t.Fatalf("%s: reference: %v", what, err)
	}
	got, err := ask(front, r)
	if err != nil {
		c.t.Fatalf("%s: %v", what, err)
	}
	if len(want) != r.max || !slices.Equal(got, want) {
		c.t.Fatalf("%s: %d tokens %v, the aggregated run gives %d: %v", what, len(got), got, len(want), want)
	}
}

// rounds is a tenth where HEADRACE_FULL is not set.
func rounds(full int) int {
	if os.Getenv("HEADRACE_FULL") != "" {
		return full
	}
	return max(full/10, 1)
}

func TestServed(t *testing.T) {
	serve(t, func(t *testing.T, c *cluster) {
		run := func(name string, n int, test func(round int)) {
			t.Run(name, func(t *testing.T) {
				c.t = t
				for i := range n {
					test(i)
				}
			})
			c.t = t
		}
		run("Equal", 1, func(int) { c.equal() })
		run("ClientGone", rounds(20), c.clientGone)
		run("PrefillKilled", rounds(20), c.prefillKilled)
		run("DecodeDaemonKilled", rounds(20), func(i int) { c.daemonKilled(1, i) })
		run("PrefillDaemonKilled", rounds(20), func(i int) { c.daemonKilled(0, i) })
	})
}

// equal has answers by both machines equal those of one worker, and the KV cache gone over RDMA.
func (c *cluster) equal() {
	lengths := []int{1, 15, 16, 17, 40, 63, 64, 65, 150, 260}
	began, asked := time.Now(), 0
	for n := range rounds(100) {
		length := lengths[n%len(lengths)]
		r := request{prompt: tokens(uint64(100+n), length), max: 8 + n%3*8, stream: n%2 == 0}
		if n%3 == 1 {
			r.seed = uint64(n)
		}
		c.right(fmt.Sprintf("prompt of %d tokens", length), r)
		asked += length
	}
	c.idle()
	sent, landed := c.nodeStatus(0).Totals, c.nodeStatus(1).Totals
	if sent.LeasesSettled == 0 || sent.BytesSent == 0 || landed.BytesLanded == 0 || landed.BytesLanded > sent.BytesSent {
		c.t.Errorf("%d leases settled, %d bytes sent, %d landed", sent.LeasesSettled, sent.BytesSent, landed.BytesLanded)
	}
	found := false
	for _, n := range c.report().Nodes {
		for _, ch := range n.Status.Channels {
			if n.ID == "node-1" && ch.PeerNode == "node-2" && ch.BytesSent > 0 {
				found = true
				if ch.Transport != transport {
					c.t.Errorf("KV cache went over %s: %s", ch.Transport, ch.Why)
				}
				c.t.Logf("headrace status: node-1 sent node-2 %d bytes of KV cache over %s (%s)", ch.BytesSent, ch.Transport, ch.Why)
			}
		}
	}
	if !found {
		c.t.Errorf("headrace status shows no bytes from node-1 to node-2: %+v", c.report().Nodes)
	}
	c.t.Logf("%d requests with %d prompt tokens in %.1f s, each asked twice; %d leases settled, %d bytes landed", rounds(100), asked, time.Since(began).Seconds(), sent.LeasesSettled, landed.BytesLanded)
}

// flight is a request under way.
type flight struct {
	request
	done   chan struct{} // closed at its end
	got    []int32
	err    error
	hangUp func()
}

func start(r request) *flight {
	ctx, cancel := context.WithTimeout(context.Background(), waitLong)
	f := &flight{request: r, done: make(chan struct{}), hangUp: cancel}
	go func() {
		defer close(f.done)
		defer cancel()
		body, err := send(ctx, front, r)
		if err != nil {
			f.err = err
			return
		}
		defer body.Close()
		f.got, f.err = readStream(body)
	}()
	return f
}

// inFlight sends a long request that is held in the middle of its transfer. The router may give a request whole to one
// worker, as it does for a while after a fault: then another is sent.
func (c *cluster) inFlight(seed uint64) (f *flight) {
	c.t.Helper()
	c.debug("pause", url.Values{"point": {transfer.PauseWriteFrame}, "after": {"2"}})
	c.eventually("a transfer is held", func() error {
		select {
		case <-f.ended():
			seed += 10_000
			f = start(request{prompt: tokens(seed, 160), max: 12, stream: true})
		default:
		}
		var waiting map[string]int
		if err := get("http://"+admin(0)+"/debug/pauses", &waiting); err != nil {
			return err
		}
		if waiting[transfer.PauseWriteFrame] == 0 {
			return fmt.Errorf("nobody waits: %v", waiting)
		}
		return nil
	})
	return f
}

var over = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// ended is closed for a request that has ended, or was never sent.
func (f *flight) ended() <-chan struct{} {
	if f == nil {
		return over
	}
	return f.done
}

// transfersAgain asks until KV cache moves between the machines again: right away, or when the router tries the pair anew.
func (c *cluster) transfersAgain(seed uint64) {
	c.t.Helper()
	settled := c.nodeStatus(0).Totals.LeasesSettled
	took := c.eventually("KV cache moves again", func() error {
		seed += 10_000
		c.right("afterwards", request{prompt: tokens(seed, 70), max: 8})
		if st := c.nodeStatus(0); st.Totals.LeasesSettled == settled {
			return fmt.Errorf("no lease has settled; channels %+v", st.Channels)
		}
		return nil
	})
	if st := c.nodeStatus(0); len(st.Channels) == 0 || st.Channels[0].Transport != transport {
		c.t.Errorf("channels of node-1 afterwards: %+v", st.Channels)
	}
	c.t.Logf("KV cache moves again %.1f s later", took.Seconds())
}

// clientGone hangs up in the middle of a transfer: all blocks come back, and the next answer is right.
func (c *cluster) clientGone(round int) {
	f := c.inFlight(uint64(1000 + round))
	f.hangUp()
	<-f.done // it ends with the context's error
	c.debug("release", nil)
	took := c.idle()
	c.t.Logf("all blocks back %v after the client went", took.Round(time.Millisecond))
	c.right("after a client went", f.request)
}

// survivors checks that only the part that was killed has gone.
func (c *cluster) survivors(before [2]map[string]int, killed string) {
	c.t.Helper()
	for i := range 2 {
		now := order[map[string]int](c, i, "Alive", 0)
		for name, pid := range before[i] {
			if name != killed && now[name] != pid {
				c.t.Errorf("%s of machine %d did not live on: process %d, now %d", name, i+1, pid, now[name])
			}
		}
	}
}

func (c *cluster) alive() (pids [2]map[string]int) {
	for i := range 2 {
		pids[i] = order[map[string]int](c, i, "Alive", 0)
	}
	return pids
}

// daemonKilled kills a machine's node daemon in the middle of a transfer and starts another: engines stay up, the request
// that was under way is answered rightly, and so are the next ones, over RDMA again.
func (c *cluster) daemonKilled(machine, round int) {
	name := fmt.Sprintf("node-%d", machine+1)
	f := c.inFlight(uint64(2000 + 100*machine + round))
	before := c.alive()
	order[bool](c, machine, "Kill", name)
	c.node(machine)
	if machine == 1 {
		c.debug("release", nil)
	}
	c.underWay(f)
	c.survivors(before, name)
	c.ready()
	c.transfersAgain(uint64(3000 + round))
	c.idle()
}

// prefillKilled kills the prefill worker in the middle of a transfer.
func (c *cluster) prefillKilled(round int) {
	f := c.inFlight(uint64(4000 + round))
	before := c.alive()
	order[bool](c, 0, "Kill", "prefill")
	c.debug("release", nil)
	c.worker("prefill", 0)
	c.underWay(f)
	c.survivors(before, "prefill")
	c.ready()
	c.transfersAgain(uint64(5000 + round))
	c.idle()
}

// underWay waits for the end of the request that was under way when something died: it is answered rightly, by another try.
func (c *cluster) underWay(f *flight) {
	c.t.Helper()
	began := time.Now()
	<-f.done
	if f.err != nil {
		c.t.Fatalf("the request that was under way: %v (%d tokens)", f.err, len(f.got))
	}
	want, err := ask(oracle, f.request)
	if err != nil {
		c.t.Fatal(err)
	}
	if !slices.Equal(f.got, want) {
		c.t.Fatalf("the request that was under way: %v, the aggregated run gives %v", f.got, want)
	}
	c.t.Logf("the request that was under way was answered rightly %.1f s later", time.Since(began).Seconds())
}
