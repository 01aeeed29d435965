package transfer

import (
	"context"
	"maps"
	"time"
)

// Channels that are held open in the background, so that no request waits for queue pairs and streams to be set up.

const (
	keptMax   = 1024                   // peers
	keptFirst = 500 * time.Millisecond // until a peer that could not be reached is dialled again, at first
	keptLast  = 30 * time.Second       // and at last
)

// keeper holds channels open to some peers.
type keeper struct {
	peers map[string]string // their data addresses, by node
	tries map[string]*keptTry
	news  chan struct{}
	runs  bool
}

type keptTry struct {
	running bool
	next    time.Time
	wait    time.Duration
}

// Keep holds channels open to these peers, data addresses by node id, in place of those of the last call. It does not
// wait. Channels to others are not closed.
func (e *Engine) Keep(peers map[string]string) {
	kept := make(map[string]string)
	for node, addr := range peers {
		if node != e.cfg.NodeID && addr != "" && len(kept) < keptMax {
			kept[node] = addr
		}
	}
	e.mu.Lock()
	k := &e.keeper
	same := maps.Equal(k.peers, kept)
	start := !k.runs && !e.closed && len(kept) > 0
	if k.news == nil {
		k.news, k.tries = make(chan struct{}, 1), make(map[string]*keptTry)
	}
	if !same {
		k.peers = kept
	}
	k.runs = k.runs || start
	if start {
		e.wg.Go(e.keep)
	}
	e.mu.Unlock()
	if !same {
		offer(k.news, struct{}{})
	}
}

// keep looks after the peers until the engine closes.
func (e *Engine) keep() {
	t := time.NewTicker(keptFirst)
	defer t.Stop()
	for {
		e.keepOnce(time.Now())
		select {
		case <-e.ctx.Done():
			return
		case <-e.keeper.news:
		case <-t.C:
		}
	}
}

func (e *Engine) keepOnce(now time.Time) {
	if e.Draining() {
		return // its successor's business
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	missing := maps.Clone(e.keeper.peers)
	for c := range e.channels {
		if _, wanted := missing[c.peer.NodeID]; wanted && c.presentable() {
			delete(missing, c.peer.NodeID)
		}
	}
	for node := range e.keeper.tries {
		if _, wanted := e.keeper.peers[node]; !wanted && !e.keeper.tries[node].running {
			delete(e.keeper.tries, node)
		}
	}
	for node, addr := range missing {
		try := e.keeper.tries[node]
		if try == nil {
			try = &keptTry{wait: keptFirst}
			e.keeper.tries[node] = try
		}
		if try.running || now.Before(try.next) || e.closed {
			continue
		}
		try.running = true
		e.wg.Go(func() { e.keepPeer(node, addr, try) })
	}
}

func (e *Engine) keepPeer(node, addr string, try *keptTry) {
	ctx, cancel := context.WithTimeout(e.ctx, e.cfg.DialTimeout)
	defer cancel()
	_, err := e.channelTo(ctx, node, addr)
	e.mu.Lock()
	try.running = false
	try.next = time.Now().Add(try.wait)
	if try.wait = min(2*try.wait, keptLast); err == nil {
		try.wait = keptFirst
	}
	e.mu.Unlock()
	if err != nil && e.ctx.Err() == nil {
		e.log.Info("channel could not be set up ahead of its use", "peer", node, "addr", addr, "error", err)
	}
}
