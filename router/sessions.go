package router

import (
	"container/list"
	"hash/maphash"
	"sync"
	"time"
)

const (
	sessionsMax     = 1 << 16 // the longest unused goes first
	sessionBytesMax = 256     // a longer name is none
)

// sessions remembers which workers served a session last. It is safe for concurrent use.
type sessions struct {
	ttl  time.Duration
	seed maphash.Seed

	mu   sync.Mutex // guards what follows
	byID map[uint64]*list.Element
	used list.List // of *sessionEntry, the latest first
}

type sessionEntry struct {
	id      uint64
	workers []string // not changed
	at      time.Time
}

func newSessions(ttl time.Duration) *sessions {
	return &sessions{ttl: ttl, seed: maphash.MakeSeed(), byID: map[uint64]*list.Element{}}
}

// id names a session of a client with a model: two clients may call theirs alike. 0 is none.
func (s *sessions) id(key, model, name []byte) uint64 {
	if len(name) == 0 || len(name) > sessionBytesMax {
		return 0
	}
	var h maphash.Hash
	h.SetSeed(s.seed)
	for _, part := range [...][]byte{key, model, name} {
		_, _ = h.Write(part)
		_ = h.WriteByte(0)
	}
	return max(h.Sum64(), 1)
}

// workers are those that the session was with, nil for nobody.
func (s *sessions) workers(id uint64, now time.Time) []string {
	if id == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.byID[id]
	if e == nil {
		return nil
	}
	x := e.Value.(*sessionEntry)
	if now.Sub(x.at) > s.ttl {
		s.drop(e)
		return nil
	}
	return x.workers
}

// stay notes which workers serve the session now.
func (s *sessions) stay(id uint64, workers []string, now time.Time) {
	if id == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.byID[id]; e != nil {
		s.drop(e)
	}
	s.byID[id] = s.used.PushFront(&sessionEntry{id, workers, now})
	for s.used.Len() > sessionsMax {
		s.drop(s.used.Back())
	}
}

func (s *sessions) drop(e *list.Element) {
	delete(s.byID, e.Value.(*sessionEntry).id)
	s.used.Remove(e)
}

// count is how many sessions are remembered, with those whose time is over and that nobody asked about since.
func (s *sessions) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used.Len()
}
