// Package kvevents publishes what the KV cache holds, in vLLM's format: batches in msgpack over a ZeroMQ PUB socket, and a
// ROUTER socket that replays the last ones. The engine never waits for a subscriber. It must not know requests or models.
package kvevents

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/headrace/headrace/internal/zmtp"
	"github.com/headrace/headrace/worker/kv"
)

const (
	topic        = "kv-events"
	batchesMax   = 10_000   // kept for replay
	bytesMax     = 64 << 20 // of these
	queueMax     = 10_000   // batches waiting for one subscriber; more are dropped, which it sees by the number
	peersMax     = 64       // connections, of each socket
	questionMax  = 1024     // bytes
	shakeTimeout = 5 * time.Second
)

// Publisher is a kv.Watcher. Its methods Stored, Removed and Flush belong to one goroutine.
type Publisher struct {
	blockTokens int
	listeners   [2]net.Listener
	log         *slog.Logger

	// Of the goroutine that tells.
	events []byte // of the batch to come
	count  uint32
	run    stored

	mu     sync.Mutex // guards what follows
	closed bool
	next   uint64
	batch  [][]byte // messages as they go over the wire, the last of them with number next-1
	bytes  int
	subs   map[*sub]struct{}
	conns  map[net.Conn]struct{}
	served sync.WaitGroup
}

// stored are blocks of one event, each the next one's parent.
type stored struct {
	parent kv.ContentID
	ids    []kv.ContentID
	tokens []int32
}

type sub struct{ queue chan []byte }

// New publishes on pub and replays on replay, until Close, which closes both.
func New(pub, replay net.Listener, blockTokens int, log *slog.Logger) *Publisher {
	p := &Publisher{blockTokens: blockTokens, listeners: [2]net.Listener{pub, replay}, log: log, subs: map[*sub]struct{}{}, conns: map[net.Conn]struct{}{}}
	p.served.Go(func() { p.accept(pub, p.subscriber) })
	p.served.Go(func() { p.accept(replay, p.asker) })
	return p
}

// Close closes all connections and waits for what serves them. It may be called again.
func (p *Publisher) Close() error {
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	err := errors.Join(p.listeners[0].Close(), p.listeners[1].Close())
	p.served.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Stored implements kv.Watcher.
func (p *Publisher) Stored(id, parent kv.ContentID, tokens []int32) {
	if n := len(p.run.ids); n == 0 || p.run.ids[n-1] != parent {
		p.endRun()
		p.run.parent = parent
	}
	p.run.ids = append(p.run.ids, id)
	p.run.tokens = append(p.run.tokens, tokens...)
}

// Removed implements kv.Watcher.
func (p *Publisher) Removed(id kv.ContentID) {
	p.endRun()
	p.count++
	b := msgp.AppendMapHeader(p.events, 3)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockRemoved")
	b = msgp.AppendUint64(msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), 1), uint64(id))
	p.events = msgp.AppendString(msgp.AppendString(b, "medium"), "CPU")
}

// endRun writes the event of blocks stored one behind the other.
func (p *Publisher) endRun() {
	r := &p.run
	if len(r.ids) == 0 {
		return
	}
	p.count++
	b := msgp.AppendMapHeader(p.events, 7)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(r.ids)))
	for _, id := range r.ids {
		b = msgp.AppendUint64(b, uint64(id))
	}
	b = msgp.AppendString(b, "parent_block_hash")
	if r.parent == kv.Root {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendUint64(b, uint64(r.parent))
	}
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(len(r.tokens)))
	for _, t := range r.tokens {
		b = msgp.AppendInt32(b, t)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), p.blockTokens)
	b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
	p.events = msgp.AppendString(msgp.AppendString(b, "medium"), "CPU")
	r.ids, r.tokens = r.ids[:0], r.tokens[:0]
}

// Flush publishes what was told since the last time, as one batch.
func (p *Publisher) Flush() {
	p.endRun()
	if p.count == 0 {
		return
	}
	payload := make([]byte, 0, len(p.events)+32)
	payload = msgp.AppendFloat64(msgp.AppendArrayHeader(payload, 3), float64(time.Now().UnixNano())/1e9)
	payload = append(msgp.AppendArrayHeader(payload, p.count), p.events...)
	payload = msgp.AppendInt(payload, 0)
	p.events, p.count = p.events[:0], 0

	p.mu.Lock()
	defer p.mu.Unlock()
	message := zmtp.AppendMessage(nil, []byte(topic), binary.BigEndian.AppendUint64(nil, p.next), payload)
	p.next++
	p.batch = append(p.batch, message)
	p.bytes += len(message)
	for len(p.batch) > batchesMax || p.bytes > bytesMax && len(p.batch) > 1 {
		p.bytes -= len(p.batch[0])
		p.batch[0] = nil
		p.batch = p.batch[1:]
	}
	for s := range p.subs {
		select {
		case s.queue <- message:
		default:
		}
	}
}

func (p *Publisher) accept(ln net.Listener, serve func(net.Conn)) {
	for {
		c, err := ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			p.log.Warn("accept a subscriber of KV events", "err", err)
			time.Sleep(50 * time.Millisecond) // out of descriptors, most likely
			continue
		}
		p.mu.Lock()
		if p.closed || len(p.conns) >= 2*peersMax {
			p.mu.Unlock()
			_ = c.Close()
			continue
		}
		p.conns[c] = struct{}{}
		p.mu.Unlock()
		p.served.Go(func() {
			serve(c)
			_ = c.Close()
			p.mu.Lock()
			delete(p.conns, c)
			p.mu.Unlock()
		})
	}
}

// subscriber sends to one that has subscribed to our topic.
func (p *Publisher) subscriber(nc net.Conn) {
	c, err := zmtp.Handshake(nc, "PUB", shakeTimeout, "SUB", "XSUB")
	if err != nil {
		p.log.Debug("serve a subscriber of KV events", "err", err)
		return
	}
	s := &sub{queue: make(chan []byte, queueMax)}
	gone := make(chan struct{})
	p.served.Go(func() {
		for {
			select {
			case <-gone:
				return
			case m := <-s.queue:
				if c.Write(m) != nil {
					_ = c.Close()
					return
				}
			}
		}
	})
	wanted := map[string]int{}
	for {
		f, err := c.Read(questionMax, time.Time{})
		if err != nil || len(f) != 1 || len(f[0]) == 0 || len(wanted) > peersMax {
			break
		}
		if want := string(f[0][1:]); f[0][0] == 1 {
			wanted[want]++
		} else if wanted[want]--; wanted[want] <= 0 {
			delete(wanted, want)
		}
		p.mu.Lock()
		delete(p.subs, s)
		for want := range wanted {
			if len(want) <= len(topic) && topic[:len(want)] == want {
				p.subs[s] = struct{}{}
			}
		}
		p.mu.Unlock()
	}
	p.mu.Lock()
	delete(p.subs, s)
	p.mu.Unlock()
	close(gone)
}

// asker replays what one asks for.
func (p *Publisher) asker(nc net.Conn) {
	c, err := zmtp.Handshake(nc, "ROUTER", shakeTimeout, "DEALER", "REQ", "ROUTER")
	if err != nil {
		p.log.Debug("serve a replay of KV events", "err", err)
		return
	}
	empty := zmtp.AppendMessage(nil, nil, nil)[:2] // an empty frame, more behind it
	for {
		f, err := c.Read(questionMax, time.Time{})
		if err != nil || len(f) != 2 || len(f[0]) != 0 || len(f[1]) != 8 {
			return
		}
		from := binary.BigEndian.Uint64(f[1])
		p.mu.Lock()
		first := p.next - uint64(len(p.batch))
		batch := p.batch
		switch {
		case from >= p.next:
			batch = nil
		case from > first:
			batch = batch[from-first:]
		}
		batch = append([][]byte(nil), batch...)
		p.mu.Unlock()
		for _, m := range batch {
			if c.Write(append(empty[:2:2], m...)) != nil {
				return
			}
		}
		if c.Send(nil, nil, binary.BigEndian.AppendUint64(nil, ^uint64(0)), nil) != nil {
			return
		}
	}
}
