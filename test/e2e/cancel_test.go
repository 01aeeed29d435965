package e2e

import (
	"fmt"
	"testing"
)

// hold is a place where a request can be made to stay.
type hold struct {
	name  string
	point string // "": decode at work
	side  func(s *scene) node
}

func holds(nodes int) []hold {
	prefill := func(s *scene) node { return s.pn }
	decode := func(s *scene) node { return s.dn }
	out := []hold{{"present", "present", prefill}, {"bind", "bind", decode}, {"settle", "settle", decode}, {"decode", "", nil}}
	if nodes == 1 {
		return append(out, hold{"copy", "copy.piece", prefill})
	}
	return append(out, hold{"write", "write.frame", prefill}, hold{"read", "read.frame", decode})
}

// longAnswer is more than decode gets done while a test hangs up.
const longAnswer = 3500

// TestHangUp: a client that leaves, in every phase: its blocks come back while the transfer is still held, so it is the
// fence that gives them back and not the end of the transfer.
func TestHangUp(t *testing.T) {
	needAll(t)
	for _, nodes := range []int{2, 1} {
		t.Run(fmt.Sprintf("%d nodes", nodes), func(t *testing.T) {
			c := start(t, options{nodes: nodes})
			for _, h := range holds(nodes) {
				for _, streamed := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s, streamed %v", h.name, streamed), func(t *testing.T) {
						c.in(t)
						s := newScene(t, c, nil, fault{nodes: nodes}, 0)
						s.hangUp(h, 1, streamed)
						s.hangUp(h, 20, streamed)
						c.split(waitShort)
					})
				}
			}
			t.Run("20 in prefill", func(t *testing.T) { hangUpInPrefill(t, c) })
			t.Run("20 anywhere", func(t *testing.T) { hangUpAnywhere(t, c) })
			t.Run("descriptors", func(t *testing.T) { descriptorsStay(t, c) })
		})
	}
}

// generated sums up the tokens that the workers have sampled.
func (c *cluster) generated() uint64 {
	c.t.Helper()
	var n uint64
	for _, w := range c.view().Workers {
		st, err := worker{w}.status()
		if err != nil {
			c.t.Fatal(err)
		}
		n += st.Counters.GenerationTokens
	}
	return n
}

// hangUp sends n requests, waits until they are held, and leaves.
func (s *scene) hangUp(h hold, n int, streamed bool) {
	s.t.Helper()
	before := s.c.generated()
	if h.point != "" {
		h.side(s).pause(s.t, h.point, 0)
		defer func() { _ = h.side(s).release() }()
	}
	var streams []*stream
	for range n {
		streams = append(streams, post(s.c.url(), request{Prompt: freshPrompt(150), MaxTokens: longAnswer, Stream: streamed}))
	}
	if h.point != "" {
		h.side(s).held(s.t, h.point)
		eventually(s.t, waitHang, "all requests hold lent blocks", func() error {
			st, err := s.p.status()
			if err == nil && (st.Running < n || st.Leased < n*150/16) {
				err = fmt.Errorf("%+v", st)
			}
			return err
		})
	} else {
		eventually(s.t, waitHang, "decode is at work", func() error {
			if got := s.c.generated() - before; got < uint64(8*n) {
				return fmt.Errorf("%d tokens so far", got)
			}
			return nil
		})
	}
	for i, st := range streams {
		if st.ended() {
			s.t.Fatalf("request %d ended before the client left: %s", i, st.a.outcome())
		}
	}
	for _, st := range streams {
		st.cancel()
	}
	for _, st := range streams {
		st.wait()
	}
	took := s.c.blocksBack(waitShort, fmt.Sprintf("after %d client(s) left in %s", n, h.name))
	bounds.add(fmt.Sprintf("blocks back, %d client(s) left in %s", n, h.name), took, nil)
	if got := s.c.generated() - before; got >= uint64(n*longAnswer) {
		s.t.Errorf("%d tokens were generated for clients that had left", got)
	}
}

// hangUpInPrefill: 20 clients leave while their prompts are computed or wait for it.
func hangUpInPrefill(t *testing.T, c *cluster) {
	c.in(t)
	const n, prompt = 20, 2000
	p := c.prefill()
	before, err := p.status()
	if err != nil {
		t.Fatal(err)
	}
	var streams []*stream
	for i := range n {
		streams = append(streams, post(c.url(), request{Prompt: freshPrompt(prompt), MaxTokens: longAnswer / 2, Stream: i%2 == 0}))
	}
	eventually(t, waitHang, "prefill is at work", func() error {
		st, err := p.status()
		if err == nil && (st.Running+st.Waiting < n/2 || st.Counters.PromptTokens == before.Counters.PromptTokens) {
			err = fmt.Errorf("%+v", st)
		}
		return err
	})
	for _, st := range streams {
		st.cancel()
	}
	bounds.add("blocks back, 20 clients left in prefill", c.blocksBack(waitShort, "after 20 clients left in prefill"), nil)
	after, err := p.status()
	if err != nil {
		t.Fatal(err)
	}
	if got := after.Counters.PromptTokens - before.Counters.PromptTokens; got >= n*prompt {
		t.Errorf("%d prompt tokens were computed for clients that had left", got)
	}
	c.split(waitShort)
}

// hangUpAnywhere: 20 clients that leave at points of their own, among six that stay and get the right answer.
func hangUpAnywhere(t *testing.T, c *cluster) {
	c.in(t)
	o := oracleFor(t, tinyModel(t))
	var stay []request
	for i := range 6 {
		stay = append(stay, sampled(request{Prompt: freshPrompt(40 + i*60), MaxTokens: 40 + i, Stream: i%2 == 0}, i))
		o.want(t, stay[i])
	}
	answers := make([]*answer, len(stay))
	atOnce(20+len(stay), 20+len(stay), func(i int) {
		if i >= 20 {
			answers[i-20] = ask(c.url(), stay[i-20])
			return
		}
		st := post(c.url(), request{Prompt: freshPrompt(1 + i*31), MaxTokens: longAnswer, Stream: true})
		if i%4 > 0 {
			_ = st.until(1<<(i%4)-1, waitHang)
		}
		st.hangUp()
	})
	for i, a := range answers {
		mustEqual(t, a, o.want(t, stay[i]), fmt.Sprintf("request %d that stayed", i))
	}
	c.blocksBack(waitShort, "after 20 clients left anywhere")
}

// descriptorsStay: what comes and goes leaves no descriptor open.
func descriptorsStay(t *testing.T, c *cluster) {
	c.in(t)
	storm := func() {
		var streams []*stream
		for i := range 20 {
			streams = append(streams, post(c.url(), request{Prompt: freshPrompt(60 + i), MaxTokens: longAnswer, Stream: i%2 == 0}))
		}
		for i, st := range streams {
			if i%2 == 0 {
				_ = st.until(3, waitHang)
			}
			st.hangUp()
		}
		c.blocksBack(waitShort, "after a storm")
		httpClient.CloseIdleConnections()
	}
	storm()
	pids := marked(c.mark)
	before := map[int]int{}
	for _, pid := range pids {
		before[pid] = openFiles(pid)
	}
	for range 3 {
		storm()
	}
	const slack = 8 // idle connections come and go
	eventually(t, waitShort, "descriptors are as many as before", func() error {
		for _, pid := range pids {
			if now := openFiles(pid); now > before[pid]+slack {
				return fmt.Errorf("%d descriptors after %d: %s", now, before[pid], describe([]int{pid}))
			}
		}
		return nil
	})
}
