package admission

// victimsMax is how many waiters one comer may displace: a large body is not worth hundreds of small ones.
const victimsMax = 32

// roundedBy is more than sums of holds are off.
const roundedBy = 1e-9

// full tells whether a request with such a body has no room to wait.
func (q *Queue) full(bytes int64) bool { return q.lacks(1, bytes) }

func (q *Queue) lacks(requests int, bytes int64) bool {
	return q.waiting+requests > q.cfg.Waiting || q.bytes+bytes > q.cfg.WaitingBytes
}

// makeRoom displaces waiters for a comer that has more right to their room: the newest of the lowest priority below its own, or,
// where nobody's is below, the newest of the tenant of the same priority that holds most of the room for its weight, unless it
// would then hold less than the comer's. All or nobody: false leaves everything as it is.
func (q *Queue) makeRoom(r *Request) bool {
	victims := q.below(r)
	if victims == nil {
		if v := q.greediest(r); v != nil {
			victims = []*waiter{v}
		}
	}
	if victims == nil {
		return false
	}
	now := q.cfg.Now()
	for _, v := range victims {
		v.state = refused
		q.remove(v)
		v.turn <- &Refusal{Why: Displaced, RetryAfter: q.retryAfter(now, v.Places), Waited: now.Sub(v.at)}
	}
	return true
}

// below are waiters of lower priority whose room is enough, nil if there are too few.
func (q *Queue) below(r *Request) []*waiter {
	var victims []*waiter
	bytes := r.Bytes
	for i := len(q.classes) - 1; i >= 0 && q.classes[i].priority > r.Priority; i-- {
		for w := q.classes[i].line.tail; w != nil && len(victims) < victimsMax; w = w.links[inClass].prev {
			victims = append(victims, w)
			if bytes -= w.Bytes; !q.lacks(1-len(victims), bytes) {
				return victims
			}
		}
	}
	return nil
}

// greediest is the waiter of the same priority that must go for r, nil for nobody.
func (q *Queue) greediest(r *Request) *waiter {
	at, found := q.class(r.Priority)
	if !found || at != len(q.classes)-1 {
		return nil
	}
	c := q.classes[at]
	s := c.greed.items[0]
	v := s.line.tail
	if s.tenant == r.Tenant || q.lacks(0, r.Bytes-v.Bytes) {
		return nil
	}
	held := q.holdOf(r) / q.weight(r.Tenant)
	if own := c.shares[r.Tenant]; own != nil {
		held += own.hold
	}
	if s.hold-q.hold(v) < held-roundedBy {
		return nil
	}
	return v
}
