package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
)

// Peer says how to examine another host.
type Peer struct {
	Examiner        // this host
	Addr     string // of the other's node daemon, or of its `headrace doctor --serve`
	Key      []byte // of the cluster
}

// exam is one examination under way.
type exam struct {
	*Peer
	conn   net.Conn
	name   string // the other host's
	checks []Check
}

const dialWait = 5 * time.Second

// Examine compares this host with another and adds what it found to the report.
func (p *Peer) Examine(ctx context.Context, r *Report) {
	x := &exam{Peer: p, name: p.Addr}
	err := x.run(ctx)
	if x.conn != nil {
		x.conn.Close()
	}
	if err != nil {
		x.add(Check{Name: "examination", Answer: Needed, Detail: err.Error(), Remedy: "run it again; the other end's log says more"})
	}
	r.Peer = x.name
	r.Checks = append(r.Checks, group(groupPeer, x.checks...)...)
}

const groupPeer = "peer"

func (x *exam) add(c ...Check) { x.checks = append(x.checks, c...) }

func (x *exam) run(ctx context.Context) error {
	c, ok := x.connect(ctx)
	x.add(c)
	if !ok {
		return nil
	}
	defer context.AfterFunc(ctx, func() { x.conn.SetDeadline(time.Unix(1, 0)) })()
	a, err := x.ask(&request{Op: "facts"})
	if err != nil {
		return fmt.Errorf("ask for facts: %w", err)
	}
	there, own := a.Facts, x.facts(x.conn)
	if there == nil || there.Version != examVersion {
		return errors.New("the other end examines in another way: use the same version of headrace on both")
	}
	if x.name = there.Host; x.name == "" || x.name == x.Host {
		x.name = x.Addr // two hosts of one name
	}
	clock, err := x.clock(own, there)
	if err != nil {
		return fmt.Errorf("compare clocks: %w", err)
	}
	x.add(x.protocol(own, there), clock, x.etherMTU(own, there))
	x.add(x.ports(own, there)...)
	return nil
}

// ask asks one thing. An error of the other end's is an error.
func (x *exam) ask(q *request) (a answer, err error) {
	x.conn.SetDeadline(time.Now().Add(requestWait))
	if err := writeMessage(x.conn, q); err != nil {
		return a, err
	}
	if err := readMessage(x.conn, &a); err != nil {
		return a, err
	}
	if a.Error != "" {
		return a, refusal(a.Error)
	}
	return a, nil
}

// refusal is the other end's error: the connection goes on.
type refusal string

func (r refusal) Error() string { return string(r) }

// connect dials and shakes hands.
func (x *exam) connect(ctx context.Context) (c Check, ok bool) {
	const name = "connection"
	need := func(detail, remedy, command string) (Check, bool) {
		return Check{Name: name, Answer: Needed, Detail: detail, Remedy: remedy, Command: command, Host: x.Addr}, false
	}
	listen := "headrace doctor --serve " + x.Addr + " --cluster-key-file FILE"
	ctx, cancel := context.WithTimeout(ctx, dialWait)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", x.Addr)
	if err != nil {
		if errors.Is(err, unix.ECONNREFUSED) {
			return need(err.Error(), "nobody listens there: name the data address of its node daemon (headrace status), or have it answer without one", listen)
		}
		return need(err.Error(), "check the address, the route and the firewalls between", "")
	}
	x.conn = conn
	conn.SetDeadline(time.Now().Add(dialWait))
	began := time.Now()
	name2, transports, err := transfer.DialExam(conn, x.Key, nodeID(x.Host))
	switch {
	case errors.Is(err, transfer.ErrVersion):
		return need(err.Error(), "daemons of these two builds refuse each other: upgrade the one that the line names", "")
	case err != nil && strings.Contains(err.Error(), "cluster key"):
		return need(err.Error(), "give both the same --cluster-key-file", "")
	case err != nil:
		return need(err.Error(), "what listens there does not let itself be examined: an older headrace, or none; at a free port this answers", listen)
	}
	x.name = name2
	uses := "no daemon"
	if len(transports) > 0 {
		uses = "a daemon that uses " + strings.Join(transports, ", ")
	}
	return yes(name, fmt.Sprintf("%s at %s, %s; both hold the same key (%v to shake hands)", name2, x.Addr, uses, time.Since(began).Round(10*time.Microsecond))), true
}

// nodeID is a name that the handshake takes.
func nodeID(host string) string {
	const most = 48
	return "doctor@" + host[:min(len(host), most)]
}

// protocol compares builds and what they speak.
func (x *exam) protocol(own, there *facts) Check {
	const name = "protocol"
	detail := fmt.Sprintf("version %d; builds %s here, %s there", min(own.High, there.High), own.Build, there.Build)
	if own.Low != there.Low || own.High != there.High {
		older := ""
		if there.High < own.High {
			older = x.name
		}
		return Check{Name: name, Answer: Lacking, Host: older, Detail: fmt.Sprintf("versions %d to %d here, %d to %d there: they agree on %d", own.Low, own.High, there.Low, there.High, min(own.High, there.High)),
			Remedy: "what is newer is not used between the two: upgrade the older one"}
	}
	return yes(name, detail)
}

// clockRounds is how often the other end's clock is read; the quickest round bounds the error.
const clockRounds = 16

func (x *exam) clock(own, there *facts) (Check, error) {
	const name = "clocks"
	var offset, trip time.Duration
	for i := range clockRounds {
		before, mono := x.now(), time.Now()
		a, err := x.ask(&request{Op: "clock"})
		if err != nil {
			return Check{}, err
		}
		took := time.Since(mono)
		if i == 0 || took < trip {
			trip = took
			offset = time.Unix(0, a.Nanos).Sub(before.Add(took / 2))
		}
	}
	word, bound := "ahead", trip/2
	if offset < 0 {
		word = "behind"
	}
	detail := fmt.Sprintf("%s is %v %s, give or take %v (round trip %v)", x.name, offset.Abs().Round(time.Microsecond), word, bound.Round(time.Microsecond), trip.Round(time.Microsecond))
	if offset.Abs() <= clockErrorMax+bound {
		return yes(name, detail), nil
	}
	c := lacking(name, detail, "tickets carry deadlines by the clock: let a time daemon keep that of "+x.name, there.ClockFix)
	c.Host = x.name
	if there.Synchronised && !own.Synchronised {
		c.Remedy, c.Command, c.Host = "tickets carry deadlines by the clock: let a time daemon keep that of this host", own.ClockFix, ""
	}
	return c, nil
}

// etherMTU compares the interfaces of the connection itself.
func (x *exam) etherMTU(own, there *facts) Check {
	const name = "interface MTU"
	switch {
	case own.Interface == "" || there.Interface == "":
		return unknown(name, "the interfaces of the connection are not known")
	case own.MTU == there.MTU:
		return yes(name, fmt.Sprintf("%d at both ends (%s, %s)", own.MTU, own.Interface, there.Interface))
	}
	c := lacking(name, fmt.Sprintf("%d here (%s), %d there (%s)", own.MTU, own.Interface, there.MTU, there.Interface), "what is larger than the smaller one is lost or cut", fmt.Sprintf("ip link set dev %s mtu %d", own.Interface, there.MTU))
	if there.MTU < own.MTU {
		c.Command, c.Host = fmt.Sprintf("ip link set dev %s mtu %d", there.Interface, own.MTU), x.name
	}
	return c
}

// active are the ports that can carry something.
func active(f *facts) []portFacts {
	return slices.DeleteFunc(slices.Clone(f.Ports), func(p portFacts) bool { return p.State != "ACTIVE" })
}

// pairsMax bounds how many pairs of ports are tried.
const pairsMax = 16

// ports compares RDMA ports, and writes from each to each.
func (x *exam) ports(own, there *facts) []Check {
	ours, theirs := active(own), active(there)
	if len(ours) == 0 || len(theirs) == 0 {
		return []Check{x.noPorts(own, there)}
	}
	var checks []Check
	reached := false
	all := pairs(len(ours), len(theirs))
	for _, p := range all[:min(len(all), pairsMax)] {
		found, ok := x.pair(&ours[p[0]], &theirs[p[1]])
		reached = reached || ok
		checks = append(checks, found...)
	}
	if reached { // a port need not reach all: two rails are two networks
		for i := range checks {
			if strings.HasSuffix(checks[i].Name, reachSuffix) && checks[i].Answer == Lacking {
				checks[i].rdma = false
			}
		}
	}
	if len(all) > pairsMax {
		checks = append(checks, unknown("other pairs of ports", fmt.Sprintf("%d of %d were tried", pairsMax, len(all))))
	}
	return checks
}

// pairs are all pairs of numbers below two, those of equal ones first: rails are mostly numbered alike.
func pairs(n, m int) (all [][2]int) {
	for apart := range max(n, m) {
		for i := range n {
			for j := range m {
				if i-j == apart || j-i == apart {
					all = append(all, [2]int{i, j})
				}
			}
		}
	}
	return all
}

func (x *exam) noPorts(own, there *facts) Check {
	const name = "RDMA"
	say := func(f *facts) string {
		if f.Lacks != "" {
			return f.Lacks
		}
		return "none of its ports is active"
	}
	switch {
	case len(active(own)) == 0 && len(active(there)) == 0:
		return lacking(name, "at neither end; here "+say(own)+"; there "+say(there), "what each host lacks is in the doctor's other groups: run headrace doctor on "+x.name+" too", "").forRDMA()
	case len(active(own)) == 0:
		return lacking(name, "not here: "+say(own), "what is missing is in the group RDMA above", "").forRDMA()
	}
	c := lacking(name, "not there: "+say(there), "run headrace doctor on it", "headrace doctor").forRDMA()
	c.Host = x.name
	return c
}
