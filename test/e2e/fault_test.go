package e2e

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"
)

// Who is hit by a fault.
const (
	decodeWorker  = "decode worker"
	prefillWorker = "prefill worker"
	decodeDaemon  = "decode's daemon" // with one node it is everybody's
	prefillDaemon = "prefill's daemon"
)

// When it hits.
const (
	inTransfer = "in a transfer"
	inStream   = "in a stream"
)

// fault is one kind of accident.
type fault struct {
	nodes  int
	victim string
	when   string
	sig    syscall.Signal
}

func (f fault) String() string {
	what := "kill -9"
	if f.sig == syscall.SIGSTOP {
		what = "SIGSTOP"
	}
	victim := f.victim
	if f.nodes == 1 && victim == decodeDaemon {
		victim = "the daemon"
	}
	return fmt.Sprintf("%s %s %s, %d node(s)", what, victim, f.when, f.nodes)
}

// scene is a healthy cluster with one fault about to happen.
type scene struct {
	t     *testing.T
	c     *cluster
	o     *oracle
	f     fault
	round int

	p, d   worker
	pn, dn node
	pid    int // the victim

	streams []*stream
	wants   []*answer
}

func newScene(t *testing.T, c *cluster, o *oracle, f fault, round int) *scene {
	t.Helper()
	s := &scene{t: t, c: c, o: o, f: f, round: round, p: c.prefill(), d: c.decode()}
	s.pn, s.dn = c.nodeOf(s.p), c.nodeOf(s.d)
	if (s.pn.ID == s.dn.ID) != (f.nodes == 1) {
		t.Fatalf("with %d nodes the workers are at nodes %s and %s", f.nodes, s.pn.ID, s.dn.ID)
	}
	t.Cleanup(func() { // what a failed round leaves must not hold the next one
		for _, n := range c.view().Nodes {
			_ = errors.Join(node{n}.release(), node{n}.rate(0))
		}
	})
	s.pid = map[string]int{decodeWorker: s.d.PID, prefillWorker: s.p.PID, decodeDaemon: s.dn.PID, prefillDaemon: s.pn.PID}[f.victim]
	return s
}

// begin sends the requests and waits until they are where the fault is to find them. A machine that is busy elsewhere
// may give the test its turn too late: then it is tried again.
func (s *scene) begin() {
	s.t.Helper()
	var err error
	for range 10 {
		if s.f.when == inTransfer {
			s.beginTransfer()
		} else {
			s.beginStream()
		}
		if err = s.premise(); err == nil {
			return
		}
		s.t.Logf("%s, round %d, once more: %v", s.f, s.round, err)
		_ = errors.Join(s.pn.release(), s.pn.rate(0), s.dn.release(), s.dn.rate(0))
		for _, st := range s.streams {
			st.hangUp()
		}
		s.c.blocksBack(waitShort, "before another try")
	}
	s.t.Fatal(err)
}

// premise tells whether every request is in its middle.
func (s *scene) premise() error {
	for i, st := range s.streams {
		if st.ended() {
			return fmt.Errorf("stream %d has ended: %s", i, st.a.outcome())
		}
		if got, all := st.tokens(), len(s.wants[i].Tokens); got > all/2 {
			return fmt.Errorf("stream %d has %d of %d tokens: that is not its middle", i, got, all)
		}
	}
	return nil
}

// several tells whether this round has four requests instead of one.
func (s *scene) several() bool { return s.round%2 == 1 }

// send starts the round's requests. What is right was computed before.
func (s *scene) send(prompt, maxTokens int) {
	s.t.Helper()
	s.streams, s.wants = nil, nil
	var requests []request
	n := 1
	if s.several() {
		n = 4
	}
	for i := range n {
		r := sampled(request{Prompt: freshPrompt(prompt + i*50), MaxTokens: maxTokens + i, Stream: true}, s.round+i)
		requests = append(requests, r)
		s.wants = append(s.wants, s.o.want(s.t, r))
	}
	for _, r := range requests {
		s.streams = append(s.streams, post(s.c.url(), r))
	}
}

// beginTransfer holds KV between the workers: at a pause point, or on every third round by a low rate.
func (s *scene) beginTransfer() {
	s.t.Helper()
	const prompt, answer = 600, 48
	if s.round%3 == 2 && s.f.victim != prefillDaemon {
		bytes := s.c.perToken(s.t) * prompt
		if err := s.pn.rate(int64(bytes / 8)); err != nil { // 8 s for what is to be hit at once
			s.t.Fatal(err)
		}
		s.send(prompt, answer)
		s.pn.moving(s.t)
		return
	}
	holder, point := s.pn, "write.frame"
	if s.f.nodes == 1 {
		point = "copy.piece"
	} else if s.f.victim == prefillDaemon { // who is stopped cannot be told to go on
		holder, point = s.dn, "read.frame"
	}
	// Each layer is at least one piece: three passages cannot complete any of the model's four.
	holder.pause(s.t, point, s.round%4)
	s.send(prompt, answer)
	holder.held(s.t, point)
}

// beginStream waits until decode is at work and has much left to do.
func (s *scene) beginStream() {
	s.t.Helper()
	answer := 2000 // under a second, and hundreds of times what the client has when the signal is sent
	if s.several() {
		answer = 700
	}
	s.send(100, answer)
	for _, st := range s.streams {
		if err := st.until(20+s.round, waitHang); err != nil {
			s.t.Fatal(err) // it is longer than that, so it failed
		}
	}
}

// letGo lifts pauses and limits. The victim may not hear it.
func (s *scene) letGo() {
	for _, n := range []node{s.pn, s.dn} {
		if n.PID != s.pid {
			_ = errors.Join(n.release(), n.rate(0))
		}
	}
}

// strike sends the signal, and checks what every client is given and when.
func (s *scene) strike() {
	s.t.Helper()
	begun, before := time.Now(), stalled()
	if err := signal(s.pid, s.f.sig); err != nil {
		s.t.Fatal(err)
	}
	s.letGo()
	for i, st := range s.streams {
		a, err := st.within(waitHang)
		if err != nil {
			s.t.Fatalf("%s, round %d, stream %d of %d: %v", s.f, s.round, i, len(s.streams), err)
		}
		took := a.Last.Sub(begun)
		bounds.add(s.f.String(), took, a)
		if took > noticeLimit+stalled()-before {
			s.t.Errorf("%s, round %d, stream %d of %d: the client's last byte came %s after the signal, limit %s (%s)", s.f, s.round, i, len(s.streams), took, noticeLimit, a.outcome())
		}
		if err := a.equalsOrFails(s.wants[i]); err != nil {
			s.t.Errorf("%s, round %d, stream %d of %d: neither the right answer nor a clear error: %v", s.f, s.round, i, len(s.streams), err)
		}
	}
}

// next checks that a request sent now succeeds, whoever serves it.
func (s *scene) next(what string) {
	s.t.Helper()
	r := sampled(request{Prompt: freshPrompt(70), MaxTokens: 20, Stream: true}, s.round)
	want := s.o.want(s.t, r)
	begun := time.Now()
	a, err := post(s.c.url(), r).within(waitHang)
	if err != nil {
		s.t.Fatalf("the next request, %s: %v", what, err)
	}
	bounds.add("the next request, "+what, a.Last.Sub(begun), a)
	mustEqual(s.t, a, want, "the next request, "+what)
}

// restarted waits until up has started the victim again.
func (s *scene) restarted() {
	s.t.Helper()
	took := eventually(s.t, waitRestart, "the "+s.f.victim+" is started again", func() error {
		v := s.c.view()
		pids := map[string]int{}
		for _, w := range v.Workers {
			pids[w.Role] = w.PID
		}
		var pid int
		switch s.f.victim {
		case decodeWorker:
			pid = pids[s.d.Role]
		case prefillWorker:
			pid = pids[s.p.Role]
		case decodeDaemon:
			n, _ := v.Node(s.dn.ID)
			pid = n.PID
		case prefillDaemon:
			n, _ := v.Node(s.pn.ID)
			pid = n.PID
		}
		if pid == 0 || pid == s.pid {
			return fmt.Errorf("pid %d after %d: workers %+v, nodes %+v", pid, s.pid, v.Workers, v.Nodes)
		}
		return nil
	})
	bounds.add("up has the killed child registered again", took, nil)
}

// recovered: nothing stays lent, and requests go through both workers again.
func (s *scene) recovered() {
	s.t.Helper()
	took := s.c.blocksBack(2*waitShort, fmt.Sprintf("after %s, round %d", s.f, s.round))
	bounds.add("all blocks are back", took, nil)
	bounds.add("requests are disaggregated again", s.c.split(waitRestart), nil)
}

// faults lists the accidents that a signal can cause.
func faults(sig syscall.Signal) []fault {
	var out []fault
	for _, nodes := range []int{2, 1} {
		for _, victim := range []string{decodeWorker, prefillWorker, decodeDaemon, prefillDaemon} {
			if nodes == 1 && victim == prefillDaemon {
				continue // the same process as decode's
			}
			for _, when := range []string{inTransfer, inStream} {
				out = append(out, fault{nodes, victim, when, sig})
			}
		}
	}
	return out
}

// TestKill: kill -9 of every part in every phase.
func TestKill(t *testing.T) {
	needAll(t)
	eachFault(t, syscall.SIGKILL, rounds(), func(s *scene) {
		s.begin()
		s.strike()
		s.next("after a kill")
		s.restarted()
		s.recovered()
	})
}

// TestStop: a part that does not die but stops.
func TestStop(t *testing.T) {
	needAll(t)
	n := 1
	if full {
		n = 6
	}
	eachFault(t, syscall.SIGSTOP, n, func(s *scene) {
		defer func() { _ = signal(s.pid, syscall.SIGCONT) }()
		s.begin()
		s.strike()
		if err := stopped(s.pid); err != nil {
			s.t.Fatal(err)
		}
		s.next("while a part is stopped")
		if err := signal(s.pid, syscall.SIGCONT); err != nil {
			s.t.Fatal(err)
		}
		s.pid = 0 // so that letGo reaches it
		s.letGo()
		s.next("after a part goes on")
		s.recovered()
	})
}

// eachFault runs all faults of a signal on one cluster for each number of nodes.
func eachFault(t *testing.T, sig syscall.Signal, times int, f func(s *scene)) {
	for _, nodes := range []int{2, 1} {
		t.Run(fmt.Sprintf("%d nodes", nodes), func(t *testing.T) {
			c := start(t, options{nodes: nodes})
			o := oracleFor(t, tinyModel(t))
			for _, ft := range faults(sig) {
				if ft.nodes != nodes {
					continue
				}
				well := t.Run(ft.victim+" "+ft.when, func(t *testing.T) {
					c.in(t)
					for round := range times {
						c.split(waitRestart)
						c.grown()
						f(newScene(t, c, o, ft, round))
					}
				})
				if !well { // what it left must not be held against the next
					c = start(t, options{nodes: nodes})
				}
			}
		})
	}
}
