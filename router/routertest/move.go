package routertest

import (
	"fmt"
	"io"
	"net/http"
	"slices"

	"github.com/headrace/headrace/internal/openai"
)

// streamOf names a stream as the router does who wants it moved.
func streamOf(id string, choice int) string { return fmt.Sprintf("%s %d", id, choice) }

// move answers a router that wants a stream to go on elsewhere.
func (w *Worker) move(rw http.ResponseWriter, r *http.Request) {
	if w.NoMoves {
		rw.WriteHeader(http.StatusNotFound)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	m, e := openai.ParseMove(body)
	if e != nil {
		w.Cluster.violate("worker %s: %s in %.300s", w.ID, e.Message, body)
		rw.WriteHeader(e.Status)
		return
	}
	x, ok := w.live.Load(streamOf(m.ID, m.Choice))
	if !ok {
		rw.WriteHeader(http.StatusConflict)
		return
	}
	c := x.(*Call)
	if w.Fault != nil {
		switch w.Fault(c, StageMove, m.Tokens) {
		case Bad:
			rw.WriteHeader(http.StatusConflict)
			return
		case Lose:
			rw.WriteHeader(http.StatusAccepted)
			return
		}
	}
	l := w.Cluster.use(w, "prefill", &KV{Ticket: m.Ticket, Peer: m.Peer})
	if l == nil {
		rw.WriteHeader(http.StatusConflict)
		return
	}
	l.tell(m.Tokens)
	select {
	case c.asked <- l:
		rw.WriteHeader(http.StatusAccepted)
		if w.Fault != nil {
			w.Fault(c, StageAsked, m.Tokens)
		}
	default:
		w.Cluster.violate("worker %s: asked twice to move a stream", w.ID)
		rw.WriteHeader(http.StatusConflict)
	}
}

// serves makes the call one that can be asked to move.
func (c *Call) serves() {
	c.asked = make(chan *lease, 1)
	c.Worker.live.Store(streamOf(c.KV.ID, c.KV.Choice), c)
}

// letGo ends what the call holds of others.
func (c *Call) letGo() {
	why := "worker " + c.Worker.ID + " let go"
	if c.lease != nil {
		c.lease.end(why)
	}
	if c.asked == nil {
		return
	}
	c.Worker.live.CompareAndDelete(streamOf(c.KV.ID, c.KV.Choice), c)
	select {
	case l := <-c.asked:
		l.end(why)
	default:
	}
}

// answer is its first n tokens.
func (c *Call) answer(n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = tokenAt(c.Prompt, c.KV.Seed+uint64(c.KV.Choice), i)
	}
	return ids
}

// moveOn has the stream go on elsewhere, if that was asked for: an error says that it has. Else it goes on here.
func (c *Call) moveOn() error {
	var l *lease
	select {
	case l = <-c.asked:
	default:
		return nil
	}
	defer l.end("worker " + c.Worker.ID + " let go")
	stays := func() error { return c.comment("stays", l.reason()) }
	if l.tokens > c.at {
		c.Worker.Cluster.violate("worker %s is to move %d tokens of %d", c.Worker.ID, l.tokens, c.at)
	}
	l.mark("presented", l.presented)
	select {
	case <-l.bound:
	case <-l.ended:
		return stays()
	case <-c.ctx.Done():
		return errAbort
	}
	if err := c.comment("handoff", ""); err != nil {
		return err
	}
	if err := c.fault(StageHandoff, c.at); err != nil {
		return err
	}
	l.hand(c.answer(c.at))
	if err := c.fault(StageTransfer, c.at); err != nil {
		return err
	}
	if !l.mark("settled", l.settled) {
		return stays()
	}
	if err := c.fault(StageSettled, c.at); err != nil {
		return err
	}
	if err := c.comment("settled", ""); err != nil {
		return err
	}
	return errDone
}

// hand puts the hand-off record in.
func (l *lease) hand(tokens []int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.record = tokens
}

func (l *lease) handed() []int32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.record)
}

// tell notes how many tokens the source was told that the other knows.
func (l *lease) tell(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tokens = n
}
