package node

import "testing"

func TestQueueIsBounded(t *testing.T) {
	q := newQueue(2, 10)
	for i, c := range []struct {
		n            int
		ok, overflow bool
	}{{4, true, false}, {4, true, false}, {1, false, true}, {1, false, false}} {
		if ok, overflow := q.push(make([]byte, c.n)); ok != c.ok || overflow != c.overflow {
			t.Errorf("push %d: %v, %v", i, ok, overflow)
		}
	}
	q.finish([]byte("last"), true)
	q.finish([]byte("again"), false)
	if len(q.frames) != 1 || string(q.frames[0]) != "last" {
		t.Errorf("left: %q", q.frames)
	}
	if q = newQueue(100, 10); true {
		if _, overflow := q.push(make([]byte, 11)); !overflow {
			t.Error("bytes are not bounded")
		}
	}
}
