package router

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/internal/adminpage"
	"github.com/headrace/headrace/router/pairing"
)

// Node is a node daemon, where it tells of itself, and where other daemons, and routers, reach its data plane.
type Node struct{ ID, Admin, Data string }

// NodeSource is a Source that knows the daemons too. Pairing then counts with what they measured of their channels, and a
// daemon that was restarted at another address is found again.
type NodeSource interface {
	// Nodes returns all daemons. The slice is not changed afterwards.
	Nodes() []Node
}

const (
	askEvery     = time.Second
	askRateMax   = 50 // daemons a second: larger fleets are asked less often
	askAtOnce    = 8
	askTimeout   = time.Second
	figuresLast  = 15 * time.Second // a daemon that does not answer is judged by what it said before for so long
	packetsLeast = 64               // sent between two answers, for a share of them to mean anything
	againSmooth  = 0.3              // of the newest share
)

// channels asks the node daemons what they measured, in the background: no request waits for an answer.
type channels struct {
	source NodeSource
	client *http.Client
	now    func() time.Time
	nodes  atomic.Pointer[map[string]*nodeFigures] // by node; replaced, never changed
	stop   context.CancelFunc
	done   chan struct{}
}

// nodeFigures is one answer. It is not changed once it is shown.
type nodeFigures struct {
	at       time.Time
	channels map[string]*channelFigures // by peer node
	tokens   map[string]float64         // bytes a block, by engine
}

type channelFigures struct {
	pairing.Channel
	sent, again uint64 // packets, when asked last
	bytes       uint64 // sent, of payload
}

// newAsker is a client for the admin pages of daemons: one connection each, which is kept for the next question.
func newAsker() *http.Client {
	return &http.Client{Timeout: askTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute}}
}

// newChannels starts asking, if the source knows whom.
func newChannels(source Source) *channels {
	c := &channels{now: time.Now, done: make(chan struct{}), client: newAsker()}
	c.nodes.Store(&map[string]*nodeFigures{})
	ctx, stop := context.WithCancel(context.Background())
	c.stop = stop
	var ok bool
	if c.source, ok = source.(NodeSource); !ok {
		close(c.done)
		return c
	}
	go c.run(ctx)
	return c
}

func (c *channels) close() {
	c.stop()
	<-c.done
	c.client.CloseIdleConnections()
}

func (c *channels) run(ctx context.Context) {
	defer close(c.done)
	for {
		n := c.ask(ctx)
		timer := time.NewTimer(max(askEvery, time.Duration(n)*time.Second/askRateMax))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// ask asks all daemons once and says how many there are.
func (c *channels) ask(ctx context.Context) int {
	nodes := c.source.Nodes()
	old := *c.nodes.Load()
	fresh := make(map[string]*nodeFigures, len(nodes))
	var mu sync.Mutex
	var asking sync.WaitGroup
	turn := make(chan struct{}, askAtOnce)
	for _, n := range nodes {
		if n.Admin == "" {
			continue
		}
		turn <- struct{}{}
		asking.Go(func() {
			defer func() { <-turn }()
			f, err := c.askOne(ctx, n.Admin, old[n.ID])
			if err != nil {
				f = old[n.ID]
			}
			if f != nil {
				mu.Lock()
				fresh[n.ID] = f
				mu.Unlock()
			}
		})
	}
	asking.Wait()
	c.nodes.Store(&fresh)
	return len(nodes)
}

// nodeStatus is what is read of a daemon's /status.
type nodeStatus struct {
	Engines []struct {
		ID       string `json:"engine_id"`
		MemberOf string `json:"member_of"` // the engine whose rank it is
		Regions  []struct {
			Bytes  float64 `json:"bytes"`
			Blocks float64 `json:"blocks"`
		} `json:"regions"`
	} `json:"engines"`
	Channels []struct {
		Peer     string  `json:"peer_node"`
		Leaving  bool    `json:"leaving"`
		LanesUp  int     `json:"lanes_up"`
		SpeedBps float64 `json:"speed_bytes_per_s"`
		Backlog  float64 `json:"backlog_bytes"`
		Bytes    uint64  `json:"bytes_sent"`
		RTT      float64 `json:"rtt_us"`
		Wire     struct {
			Sent  uint64  `json:"sent_packets"`
			Again uint64  `json:"retransmitted_packets"`
			RTT   float64 `json:"rtt_us"`
		} `json:"wire"`
	} `json:"channels"`
}

func (c *channels) askOne(ctx context.Context, admin string, before *nodeFigures) (*nodeFigures, error) {
	var s nodeStatus
	if err := adminpage.Get(ctx, c.client, admin, "/status", &s); err != nil {
		return nil, fmt.Errorf("ask %s: %w", admin, err)
	}
	return s.figures(c.now(), before), nil
}

func (s *nodeStatus) figures(now time.Time, before *nodeFigures) *nodeFigures {
	f := &nodeFigures{at: now, channels: make(map[string]*channelFigures), tokens: make(map[string]float64)}
	for _, e := range s.Engines {
		for _, r := range e.Regions {
			if r.Blocks > 0 {
				f.tokens[cmp.Or(e.MemberOf, e.ID)] += r.Bytes / r.Blocks
			}
		}
	}
	for _, c := range s.Channels {
		if c.Leaving || c.LanesUp == 0 {
			continue
		}
		x := f.channels[c.Peer]
		if x == nil {
			x = &channelFigures{}
			f.channels[c.Peer] = x
		}
		// Two daemons may have dialled each other: either channel may carry the next lease.
		x.SpeedBps = max(x.SpeedBps, c.SpeedBps)
		x.BacklogBytes += c.Backlog
		x.bytes += c.Bytes
		x.sent += c.Wire.Sent
		x.again += c.Wire.Again
		rtt := c.Wire.RTT // the kernel's is of the lanes; a ping waits behind other frames
		if rtt == 0 {
			rtt = c.RTT
		}
		x.RTT = max(x.RTT, time.Duration(rtt*1e3))
	}
	for peer, x := range f.channels {
		var old *channelFigures
		if before != nil {
			old = before.channels[peer]
		}
		x.share(old)
	}
	return f
}

// share works out how much was sent again since the answer before.
func (x *channelFigures) share(old *channelFigures) {
	if old == nil || x.sent < old.sent || x.again < old.again {
		return // new, or begun anew
	}
	x.AgainShare = old.AgainShare
	if sent := x.sent - old.sent; sent >= packetsLeast {
		x.AgainShare += againSmooth * (min(float64(x.again-old.again)/float64(sent), 1) - x.AgainShare)
	} else if x.again == old.again {
		x.sent = old.sent // wait until there are enough
	}
}

// dataAddr is where a worker's daemon is reached: a restarted one has told so before its engines attach to it again.
func dataAddr(source Source) func(*pairing.Worker) string {
	nodes, _ := source.(NodeSource)
	return func(w *pairing.Worker) string {
		if nodes != nil {
			for _, n := range nodes.Nodes() {
				if n.ID == w.NodeID && n.Data != "" {
					return n.Data
				}
			}
		}
		return w.NodeData
	}
}

// between is what is known of the way from one worker to another.
func (c *channels) between(p, d *pairing.Worker) (pairing.Channel, bool) {
	n := (*c.nodes.Load())[p.NodeID]
	if n == nil || c.now().Sub(n.at) > figuresLast {
		return pairing.Channel{}, false
	}
	x := n.channels[d.NodeID]
	if x == nil {
		return pairing.Channel{}, false
	}
	out := x.Channel
	out.TokenBytes = n.tokenBytes(p)
	return out, true
}

// tokenBytes is what a token takes in a worker's KV cache; 0: not known.
func (n *nodeFigures) tokenBytes(w *pairing.Worker) float64 {
	if w.BlockTokens == 0 {
		return 0
	}
	return n.tokens[w.ID] / float64(w.BlockTokens)
}

func (c *channels) tokenBytes(w *pairing.Worker) float64 {
	if n := (*c.nodes.Load())[w.NodeID]; n != nil {
		return n.tokenBytes(w)
	}
	return 0
}

// ChannelStatus is a channel of one node daemon to another, or to itself, as the sending end told of it.
type ChannelStatus struct {
	From         string  `json:"from"`
	To           string  `json:"to"`
	SpeedBps     float64 `json:"speed_bytes_per_s"` // of sending while there was something to send; 0: not measured yet
	SentBytes    uint64  `json:"sent_bytes"`        // of payload, since it was opened
	BacklogBytes float64 `json:"backlog_bytes"`
	RTTMicros    float64 `json:"rtt_us"`
	AgainShare   float64 `json:"again_share"` // of packets, that were sent again lately
}

// status lists the channels over which something was sent, of daemons that answered lately.
func (c *channels) status() []ChannelStatus {
	nodes := *c.nodes.Load()
	var list []ChannelStatus
	for _, from := range slices.Sorted(maps.Keys(nodes)) {
		n := nodes[from]
		if c.now().Sub(n.at) > figuresLast {
			continue
		}
		for _, to := range slices.Sorted(maps.Keys(n.channels)) {
			x := n.channels[to]
			if x.bytes == 0 {
				continue // there are as many as pairs of daemons
			}
			list = append(list, ChannelStatus{From: from, To: to, SpeedBps: x.SpeedBps, SentBytes: x.bytes, BacklogBytes: x.BacklogBytes,
				RTTMicros: float64(x.RTT) / float64(time.Microsecond), AgainShare: x.AgainShare})
		}
	}
	return list
}
