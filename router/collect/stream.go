package collect

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/headrace/headrace/internal/zmtp"
)

const (
	batchBytesMax = 16 << 20 // a prompt of a million tokens takes 5 MB
	dialTimeout   = 3 * time.Second
	answerTimeout = 3 * time.Second // for each next batch of a replay; vLLM looks for questions ten times a second
	// idleCheck is how long a publisher may be silent before it is asked whether it has anything new: what was lost behind
	// the last batch that came would otherwise show at the next one only.
	idleCheck      = 10 * time.Second
	reconnectFirst = 100 * time.Millisecond
	reconnectMax   = 5 * time.Second
	replaysFailMax = 3   // in a row, before what was missed is given up
	roundsMax      = 256 // of one replay: a ROUTER socket drops what its queue, of 1,000 mostly, cannot take
)

var errHole = errors.New("replay KV events: some were dropped on the way")

// stream follows one publisher: live batches over a SUB socket, what was missed by asking its replay socket. The sequence
// numbers that count here are of one publisher process. A new one begins again at 0, which shows by this: asked for the last
// batch that was taken, it has another, or none.
type stream struct {
	src          Source
	addr, replay string
	dial         func(ctx context.Context, addr string) (net.Conn, error)
	held         *holdings
	sink         sinks // held among others
	wanting      sinks // those that the batch at hand is for
	decode       decoder
	note         func(s *stream, err error)

	// Of the goroutine that runs the stream.
	known    bool   // whether next and last mean something
	next     uint64 // sequence number of the batch to come
	last     uint64 // hash of the one before, while next > 0
	replayed uint64 // batches below this came by replay, and may come again
	failed   int    // replays in a row
	clean    bool   // nothing was told to the sink since the last Reset

	mu    sync.Mutex // guards what follows
	state string
	err   string

	figures streamFigures
}

type streamFigures struct {
	next, batches, gaps, replays, lost, resets, unreadable, ignored, connects atomic.Uint64
	connected                                                                 atomic.Bool
}

// run follows the publisher until ctx ends.
func (s *stream) run(ctx context.Context) {
	s.clean = true
	wait := reconnectFirst
	for ctx.Err() == nil {
		before := s.figures.connects.Load()
		err := s.session(ctx)
		s.figures.connected.Store(false)
		if ctx.Err() != nil {
			break
		}
		s.say("connecting", err)
		if s.figures.connects.Load() > before {
			wait = reconnectFirst
		}
		timer := time.NewTimer(wait/2 + rand.N(wait))
		select {
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
		wait = min(2*wait, reconnectMax)
	}
	s.reset("it is not followed any more")
}

func (s *stream) say(state string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	s.mu.Lock()
	changed := text != "" && s.err == ""
	s.state, s.err = state, text
	s.mu.Unlock()
	if changed && s.note != nil {
		s.note(s, err)
	}
}

// open connects a socket to a publisher's. Closing is for the caller, and for the end of ctx.
func (s *stream) open(ctx context.Context, addr, socket string, peers ...string) (*zmtp.Conn, func(), error) {
	dctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	nc, err := s.dial(dctx, addr)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	c, err := zmtp.Handshake(nc, socket, dialTimeout, peers...)
	if err != nil {
		stop()
		return nil, nil, errors.Join(fmt.Errorf("connect to %s: %w", addr, err), nc.Close())
	}
	return c, func() {
		stop()
		_ = c.Close()
	}, nil
}

// session is one connection to the publisher.
func (s *stream) session(ctx context.Context) error {
	sub, closeSub, err := s.open(ctx, s.addr, "SUB", "PUB", "XPUB")
	if err != nil {
		return err
	}
	defer closeSub()
	if err := sub.Subscribe(""); err != nil {
		return err
	}
	s.figures.connected.Store(true)
	if s.replay == "" && s.known {
		s.reset("the connection broke, and it has no replay")
		s.known = false
	}
	// Behind the subscription: what is published from now on is in the socket, or shows as a gap.
	if err := s.sync(ctx); err != nil {
		return err
	}
	s.figures.connects.Add(1)
	for {
		frames, err := sub.Read(batchBytesMax, time.Now().Add(idleCheck))
		switch {
		case errors.Is(err, zmtp.ErrIdle) && ctx.Err() == nil:
			if err := s.sync(ctx); err != nil {
				return err
			}
			continue
		case errors.Is(err, zmtp.ErrTooLarge):
		case err != nil:
			return fmt.Errorf("read KV events from %s: %w", s.addr, err)
		}
		seq, payload, ok := parse(frames, errors.Is(err, zmtp.ErrTooLarge))
		if !ok {
			return fmt.Errorf("read KV events from %s: a message of %d frames; want topic, sequence number, batch", s.addr, len(frames))
		}
		if err := s.live(ctx, seq, payload); err != nil {
			return err
		}
	}
}

// parse takes sequence number and payload out of a message, whose last two frames they are. Without a payload, when the
// batch was too large, its number is the last frame that was kept.
func parse(frames [][]byte, tooLarge bool) (seq uint64, payload []byte, ok bool) {
	if tooLarge {
		if n := len(frames); n > 0 && len(frames[n-1]) == 8 {
			return binary.BigEndian.Uint64(frames[n-1]), nil, true
		}
		return 0, nil, false
	}
	n := len(frames)
	if n < 2 || len(frames[n-2]) != 8 {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(frames[n-2]), frames[n-1], true
}

// live takes a batch that came by itself.
func (s *stream) live(ctx context.Context, seq uint64, payload []byte) error {
	if !s.known {
		if s.known, s.next = true, seq; seq > 0 {
			s.lose(seq)
		}
	}
	if seq < s.next && seq < s.replayed {
		return nil // came by replay already
	}
	if seq != s.next {
		if seq > s.next {
			s.figures.gaps.Add(1)
		} // else it counts anew without a new connection: a proxy is between
		payload = append([]byte(nil), payload...)
		if err := s.sync(ctx); err != nil {
			return err
		}
		if s.known && seq < s.next && seq < s.replayed {
			return nil
		}
		if s.known && seq != s.next {
			s.reset("batches were missed that cannot be had again")
			if seq > s.next {
				s.lose(seq - s.next)
			}
		}
		if !s.known && seq > 0 {
			s.lose(0)
		}
		s.known, s.next = true, seq
	}
	s.take(seq, payload)
	return nil
}

// take takes the next batch.
func (s *stream) take(seq uint64, payload []byte) {
	s.clean = false
	err := errors.New("read KV events: the batch is too large")
	s.next, s.last = seq+1, xxhash.Sum64(payload)
	if payload != nil {
		s.wanting = s.sink.wanting(s.src, seq, s.last, s.wanting[:0])
		err = s.decode.batch(payload, s.src, s.wanting)
		s.wanting.end(s.src, seq, s.last)
	}
	s.figures.next.Store(s.next)
	s.figures.batches.Add(1)
	s.figures.ignored.Store(s.decode.ignored)
	if err != nil {
		s.figures.unreadable.Add(1)
		s.reset("a batch cannot be read")
		s.lose(1)
		s.say("following", err)
	}
}

func (s *stream) reset(why string) {
	if s.clean {
		return
	}
	s.clean = true
	s.figures.resets.Add(1)
	s.sink.Reset(s.src, why)
}

func (s *stream) lose(n uint64) {
	s.clean = false
	s.figures.lost.Add(n)
	s.sink.Lost(s.src, n)
}

// sync makes up for what was missed, and finds out whether the publisher is still the one it was. While replays fail it
// answers with an error, which makes the session begin again; after some of them it gives up what was missed.
func (s *stream) sync(ctx context.Context) error {
	if s.replay == "" {
		s.say("following without replay", nil)
		return nil
	}
	err := s.rounds(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err == nil {
		s.failed = 0
		s.say("following", nil)
		return nil
	}
	if s.failed++; s.failed < replaysFailMax {
		return err
	}
	if s.known {
		s.reset("batches may have been missed, and replay fails")
	}
	s.known = false
	s.say("following without replay", err)
	return nil
}

// rounds asks until an answer is whole.
func (s *stream) rounds(ctx context.Context) error {
	s.figures.replays.Add(1)
	var err error
	for range roundsMax {
		before := s.next
		var again bool
		if again, err = s.round(ctx); !again && err == nil {
			s.replayed = s.next
			return nil
		}
		if err != nil && (!errors.Is(err, errHole) || s.next == before) {
			return err
		}
	}
	return err
}

// round asks once: from the last batch taken, which tells whether it is the same publisher. again says to ask again, from the begin.
func (s *stream) round(ctx context.Context) (again bool, err error) {
	router, closeRouter, err := s.open(ctx, s.replay, "DEALER", "ROUTER")
	if err != nil {
		return false, err
	}
	defer closeRouter()
	from := uint64(0)
	verify := s.known && s.next > 0
	if verify {
		from = s.next - 1
	}
	if err := router.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return false, err
	}
	for {
		frames, err := router.Read(batchBytesMax, time.Now().Add(answerTimeout))
		if err != nil && !errors.Is(err, zmtp.ErrTooLarge) {
			if errors.Is(err, zmtp.ErrIdle) && ctx.Err() == nil && !verify && s.known {
				return false, fmt.Errorf("%w (%w)", errHole, err) // its end, too
			}
			return false, fmt.Errorf("replay KV events from %s: %w", s.replay, err)
		}
		seq, payload, ok := parse(frames, err != nil)
		if !ok {
			return false, fmt.Errorf("replay KV events from %s: an answer of %d frames", s.replay, len(frames))
		}
		end := seq == ^uint64(0)
		if verify && (end || seq != from || xxhash.Sum64(payload) != s.last) {
			s.reset("the engine is another one, or has forgotten what was missed")
			s.known, s.next, s.replayed = false, 0, 0
			return true, nil
		}
		if end {
			if !s.known {
				s.known, s.next = true, 0 // nothing was published yet
			}
			return false, nil
		}
		if verify {
			verify = false
			continue
		}
		if !s.known {
			if s.known, s.next = true, seq; seq > 0 {
				s.lose(seq)
			}
		}
		if seq != s.next {
			return false, errHole
		}
		s.take(seq, payload)
	}
}
