package routertest

import (
	"fmt"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer/ticket"
)

// Key is the cluster key of the fakes.
var Key = []byte("a cluster key for tests only")

// Cluster stands for the node daemons: it knows every lease, and what went wrong.
type Cluster struct {
	mu         sync.Mutex
	leases     map[[16]byte]*lease
	held       int // blocks
	violations []string
	recalls    int
	answers    map[string]*nixlAnswer // by the parameters
	meetings   map[string]*meeting    // by transfer id, room or request id
	rooms      map[string]string      // whose each is
	words      words
}

// NewCluster makes one.
func NewCluster() *Cluster { return &Cluster{leases: map[[16]byte]*lease{}} }

// lease of one ticket.
type lease struct {
	presented, computed, bound, settled, ended chan struct{}

	mu     sync.Mutex
	is     map[string]bool // which of the channels are closed
	record []int32         // of the hand-off: the answer's tokens so far
	tokens int             // of a stream that moves: those that the other side was asked to go on behind
	why    string
}

func newLease() *lease {
	return &lease{presented: make(chan struct{}), computed: make(chan struct{}), bound: make(chan struct{}), settled: make(chan struct{}), ended: make(chan struct{}),
		is: map[string]bool{}}
}

func (l *lease) mark(what string, ch chan struct{}) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.is[what] || l.is["ended"] || what == "ended" && l.is["settled"] {
		return false
	}
	l.is[what] = true
	close(ch)
	return true
}

func (l *lease) reason() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.why
}

func (l *lease) end(why string) {
	l.mu.Lock()
	if l.why == "" {
		l.why = why
	}
	l.mu.Unlock()
	l.mark("ended", l.ended)
}

func (c *Cluster) violate(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.violations = append(c.violations, fmt.Sprintf(format, args...))
}

// Violations returns what the router did against the protocol.
func (c *Cluster) Violations() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.violations...)
}

// Held returns how many blocks are lent.
func (c *Cluster) Held() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.held
}

// Leases returns how many tickets were used.
func (c *Cluster) Leases() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.leases)
}

// dataAddr is where a fake worker's daemon would listen.
func dataAddr(worker string) string { return "data-of-" + worker + ":7000" }

func (c *Cluster) hold(n int) {
	c.mu.Lock()
	c.held += n
	c.mu.Unlock()
}

// use checks a ticket as the daemons and engines would, and returns its lease.
func (c *Cluster) use(w *Worker, role string, kv *KV) *lease {
	t, err := ticket.Verify(Key, kv.Ticket, time.Now())
	if err != nil {
		c.violate("worker %s: %v", w.ID, err)
		return nil
	}
	if role == "prefill" && (t.PEngine != w.ID || t.PNode != w.NodeID) || role == "decode" && (t.DEngine != w.ID || t.DNode != w.NodeID) {
		c.violate("worker %s got %+v as %s", w.ID, t, role)
	}
	if role == "prefill" && kv.Peer != dataAddr(t.DEngine) {
		c.violate("worker %s is to push to %s, the ticket is for %s", w.ID, kv.Peer, t.DEngine)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.leases[t.Nonce]
	if l == nil {
		l = newLease()
		c.leases[t.Nonce] = l
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.is["used by "+role] {
		c.violations = append(c.violations, fmt.Sprintf("worker %s: the ticket was used twice", w.ID))
	}
	l.is["used by "+role] = true
	return l
}

// Teach has the engines give the words of prompts their token ids in this order, as those of another process do that is taught the same.
func (c *Cluster) Teach(prompts ...string) {
	for _, p := range prompts {
		c.words.tokenize(p)
	}
}
