package collect

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"
)

// ranksMax bounds the publishers of one worker.
const ranksMax = 64

func overTCP(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}}
	return d.DialContext(ctx, "tcp", addr)
}

// listen makes sure that the first n data-parallel ranks' events are followed. The goroutines are counted in running.
func (f *follower) listen(n int, running *sync.WaitGroup) {
	var streams []*stream
	if old := f.streams.Load(); old != nil {
		streams = *old
	}
	n = min(n, ranksMax)
	if f.w.Events == "" || n <= len(streams) {
		return
	}
	streams = append([]*stream(nil), streams...)
	for rank := len(streams); rank < n; rank++ {
		s, err := f.stream(rank)
		if err != nil {
			f.c.cfg.Logger.Warn("follow KV events", "worker", f.w.ID, "rank", rank, "err", err)
			break
		}
		streams = append(streams, s)
		running.Go(func() { s.run(f.ctx) })
	}
	f.streams.Store(&streams)
}

func (f *follower) stream(rank int) (*stream, error) {
	addr, err := offset(f.w.Events, rank)
	if err != nil {
		return nil, err
	}
	replay := ""
	if f.w.EventsReplay != "" {
		if replay, err = offset(f.w.EventsReplay, rank); err != nil {
			return nil, err
		}
	}
	held := &holdings{}
	out := sinks{held}
	if f.c.cfg.Sink != nil {
		out = append(out, f.c.cfg.Sink)
	}
	return &stream{src: Source{Worker: f.w.ID, Incarnation: f.w.Incarnation, Rank: rank}, addr: addr, replay: replay, dial: f.c.cfg.Dial,
		held: held, sink: out, state: "connecting", note: func(s *stream, err error) {
			f.c.cfg.Logger.Info("follow KV events", "worker", f.w.ID, "rank", rank, "at", addr, "err", err)
		}}, nil
}

// offset is the address of a rank: its port is that many behind the first one's.
func offset(addr string, rank int) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", err
	}
	n, err := strconv.Atoi(port)
	if err != nil || n < 1 || n+rank > 65535 {
		return "", fmt.Errorf("port %q of rank %d is out of range", port, rank)
	}
	return net.JoinHostPort(host, strconv.Itoa(n+rank)), nil
}

// EventStatus is what is known of a publisher of KV events, for people to read.
type EventStatus struct {
	Rank   int    `json:"rank"`
	Addr   string `json:"addr"`
	Replay string `json:"replay,omitempty"`
	State  string `json:"state"` // connecting, following, following without replay

	Blocks   int64 `json:"blocks"`   // that the engine holds, by its events
	Contents int64 `json:"contents"` // of these blocks: some may have the same
	Tokens   int64 `json:"tokens"`

	Next       uint64 `json:"next"` // sequence number of the batch to come
	Batches    uint64 `json:"batches"`
	Stored     uint64 `json:"stored"` // blocks
	Removed    uint64 `json:"removed"`
	Cleared    uint64 `json:"cleared"`
	Gaps       uint64 `json:"gaps"`
	Replays    uint64 `json:"replays"`
	Lost       uint64 `json:"lost_batches"`
	Resets     uint64 `json:"resets"`
	Unreadable uint64 `json:"unreadable_batches"`
	Ignored    uint64 `json:"unknown_events"`
	Unheld     uint64 `json:"removed_unheld"` // removals of blocks that were not known to be there
	Beyond     uint64 `json:"beyond_limit"`   // blocks that there was no place for
	Problem    string `json:"problem,omitempty"`

	connected bool
}

func (s *stream) status() EventStatus {
	x := &s.figures
	st := EventStatus{Rank: s.src.Rank, Addr: s.addr, Replay: s.replay, Next: x.next.Load(), Batches: x.batches.Load(), Gaps: x.gaps.Load(), Replays: x.replays.Load(),
		Lost: x.lost.Load(), Resets: x.resets.Load(), Unreadable: x.unreadable.Load(), Ignored: x.ignored.Load(), connected: x.connected.Load()}
	s.mu.Lock()
	st.State, st.Problem = s.state, s.err
	s.mu.Unlock()
	h := s.held
	h.mu.Lock()
	defer h.mu.Unlock()
	st.Blocks, st.Contents, st.Tokens = h.blocks, int64(len(h.set)), h.tokens
	st.Stored, st.Removed, st.Cleared, st.Unheld, st.Beyond = h.stored, h.removed, h.cleared, h.unheld, h.beyond
	return st
}
