package cgo

import (
	"fmt"
	"syscall"
)

// CQ is a completion queue. One goroutine at a time polls and arms it.
type CQ struct {
	dev *Device
	c   object
}

// NewCQ makes a completion queue of at least that many entries; channel may be nil.
func (d *Device) NewCQ(entries int, channel *Channel) (*CQ, error) {
	var ch object
	if channel != nil {
		ch = channel.c
	}
	c, errno := cCreateCQ(d.c, entries, ch)
	if errno != 0 {
		return nil, fail(errno, "make a completion queue of %d entries on %s", entries, d.Name)
	}
	return &CQ{dev: d, c: c}, nil
}

// Close frees the queue, after its queue pairs.
func (q *CQ) Close() error {
	return release(&q.c, cDestroyCQ, "free a completion queue of "+q.dev.Name)
}

// Poll takes completions, as many as there are and fit.
func (q *CQ) Poll(out []WC) (int, error) {
	n := cPoll(q.c, out)
	if n < 0 {
		return 0, fail(syscall.Errno(-n), "poll a completion queue of %s", q.dev.Name)
	}
	return n, nil
}

// Arm asks for an event on the channel with the next completion. What came before must be polled for once more.
func (q *CQ) Arm() error {
	return fail(cArm(q.c), "arm a completion queue of %s", q.dev.Name)
}

// QP is a reliable connected queue pair. One goroutine at a time posts to each of its two queues.
type QP struct {
	Num  uint32
	Caps QPCaps // as the device granted them
	dev  *Device
	c    object
}

// NewQP makes a queue pair.
func (p *PD) NewQP(send, recv *CQ, caps QPCaps) (*QP, error) {
	q := &QP{dev: p.dev, Caps: caps}
	var errno syscall.Errno
	if q.c, q.Num, errno = cCreateQP(p.c, send.c, recv.c, &q.Caps); errno != 0 {
		return nil, fail(errno, "make a queue pair of %d sends and %d receives on %s", caps.SendWR, caps.RecvWR, p.dev.Name)
	}
	return q, nil
}

// transitions is what a reliable connected queue pair must be given on its way to each state: see "QP state transition
// properties" in the InfiniBand Architecture Specification, volume 1.
var transitions = map[QPState]QPMask{
	QPInit:  MaskState | MaskPKeyIndex | MaskPort | MaskAccess,
	QPRTR:   MaskState | MaskAddress | MaskPathMTU | MaskDestQPN | MaskRQPSN | MaskMaxReadsServed | MaskMinRNRTimer,
	QPRTS:   MaskState | MaskTimeout | MaskRetryCount | MaskRNRRetry | MaskSQPSN | MaskMaxReads,
	QPError: MaskState,
}

// To moves the queue pair to a state, with what of a that takes: Mask and State are filled in.
func (q *QP) To(s QPState, a QPAttr) error {
	mask, known := transitions[s]
	if !known { // with an empty mask the kernel would say yes and do nothing
		panic(fmt.Sprintf("cgo: no way of a queue pair to %v is known", s))
	}
	a.State, a.Mask = s, mask
	return fail(cModifyQP(q.c, &a), "move QP %d of %s to %v", q.Num, q.dev.Name, s)
}

// State asks the device for the queue pair's state.
func (q *QP) State() (QPState, error) {
	s, errno := cQueryQP(q.c)
	return s, fail(errno, "query QP %d of %s", q.Num, q.dev.Name)
}

// Close destroys the queue pair.
func (q *QP) Close() error {
	return release(&q.c, cDestroyQP, fmt.Sprintf("destroy QP %d of %s", q.Num, q.dev.Name))
}

// PostSend posts work requests in order and says how many the device took: all of them, or those before the one that errno
// is about. ENOMEM means that the queue is full: the rest may be posted after completions.
func (q *QP) PostSend(wrs []WR) (posted int, errno syscall.Errno) {
	if len(wrs) == 0 {
		return 0, 0
	}
	return cPostSend(q.c, wrs)
}

// PostRecv posts receives, as PostSend does.
func (q *QP) PostRecv(wrs []Recv) (posted int, errno syscall.Errno) {
	if len(wrs) == 0 {
		return 0, 0
	}
	return cPostRecv(q.c, wrs)
}

// PostBind posts the binding of a window to a part of registered memory, and sets the key that the window will have then.
func (q *QP) PostBind(w *Window, mr *MR, addr, length uint64, access Access, id uint64) error {
	key := w.RKey&^0xff | (w.RKey+1)&0xff // the consumer owns the low byte, and changes it with each bind
	if errno := cPostBind(q.c, w.c, mr.c, key, addr, length, access, id); errno != 0 {
		return fail(errno, "bind a memory window on QP %d of %s", q.Num, q.dev.Name)
	}
	w.RKey = key
	return nil
}

// NullQP makes a queue pair and completion queue without hardware: the same entry points with nothing behind. With depth 0
// it takes everything and does nothing, so that what is left is the cost of posting. With a depth it takes that many
// requests, answers ENOMEM beyond, and polling completes what was posted.
func NullQP(depth int) (*QP, *CQ, error) {
	q, c, errno := cNullCreate(depth)
	if errno != 0 {
		return nil, nil, fail(errno, "make a queue pair of the null provider")
	}
	dev := &Device{Name: "null"}
	return &QP{Num: 1, dev: dev, c: q}, &CQ{dev: dev, c: c}, nil
}

// CloseNull frees a queue pair of the null provider, and its completion queue.
func CloseNull(q *QP) {
	if q.c != nil {
		cNullDestroy(q.c)
		q.c = nil
	}
}

// NullLoop is what NullQP's cost is compared with: a plain C loop that posts the same writes so many times, in chains of 64
// or one by one. It gives the nanoseconds of all rounds.
func NullLoop(q *QP, wrs []WR, rounds int, chained bool) uint64 {
	return cNullLoop(q.c, wrs, rounds, chained)
}

// Entries are the addresses of functions in this process that one in 32 work requests and their completions pass, for who
// measures from outside. 0: this build has none.
type Entries struct {
	Post uintptr // (queue pair, work request)
	Poll uintptr // (completion queue, completion)
}

// EntryPoints gives them.
func EntryPoints() Entries { return cEntries() }

// Live counts the objects that exist in this process.
func Live() Handles { return cHandles() }
