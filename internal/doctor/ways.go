package doctor

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/headrace/headrace/cgo"
)

// Sizes and times of the writes from port to port.
const (
	tryBytes   = 64 << 10
	proofBytes = 4 << 20
	tripTimes  = 16
	patience   = 10 * time.Second
	smallMTU   = 1024

	reachSuffix = " way"
)

// way is a pair of addresses, one of each end's port.
type way struct {
	own, there gidFacts
	word       string
}

// ways lists the pairs of addresses of the same kind, the best first.
func ways(a, b *portFacts) (all []way) {
	if a.Layer != ethernet {
		return []way{{first(a.GIDs), first(b.GIDs), "InfiniBand"}}
	}
	words := map[cgo.Reach]string{cgo.ReachIPv4: "RoCE v2 over IPv4", cgo.ReachIPv6: "RoCE v2 over IPv6", cgo.ReachLink: "RoCE v2 over addresses of the link"}
	for _, reach := range []cgo.Reach{cgo.ReachIPv4, cgo.ReachIPv6, cgo.ReachLink} {
		for _, g := range a.GIDs {
			for _, far := range b.GIDs {
				if g.reach() == reach && far.reach() == reach && len(all) < pairsMax {
					all = append(all, way{g, far, words[reach]})
				}
			}
		}
	}
	return all
}

func (g gidFacts) reach() cgo.Reach { return gid{text: g.Text, kind: g.Kind}.reach() }

// reach is that of the port's best address.
func (p *portFacts) reach() (best cgo.Reach) {
	for _, g := range p.GIDs {
		best = max(best, g.reach())
	}
	return best
}

func first(g []gidFacts) gidFacts {
	if len(g) == 0 {
		return gidFacts{}
	}
	return g[0]
}

// pair makes all checks about two ports, and says whether one reaches the other.
func (x *exam) pair(a, b *portFacts) (checks []Check, reached bool) {
	at := fmt.Sprintf("%v - %v", a, b)
	if a.Layer != b.Layer {
		return []Check{lacking(at+reachSuffix, fmt.Sprintf("%s here, %s there", a.Layer, b.Layer), "ports of different networks do not reach each other", "").forRDMA()}, false
	}
	checks = append(checks, x.roceMTU(at, a, b))
	all := ways(a, b)
	if len(all) == 0 {
		return append(checks, x.noWay(at, a, b)), false
	}
	var good, bad []string
	var why error // not by the addresses that channels would use
	for i := range all {
		w := &all[i]
		words := fmt.Sprintf("%s (index %d to %d)", w.word, w.own.Index, w.there.Index)
		if _, _, err := x.send(a, b, w, min(a.MTU, b.MTU), tryBytes); err != nil {
			bad = append(bad, fmt.Sprintf("%s: %v", words, err))
			if i == 0 {
				why = err
			}
			continue
		}
		good = append(good, words)
	}
	if why != nil {
		return append(checks, x.blocked(at, a, b, &all[0], why, bad)), false
	}
	detail := strings.Join(good, ", ")
	if len(bad) > 0 {
		detail += "; not " + strings.Join(bad, ", ")
	}
	return append(checks, yes(at+reachSuffix, detail).forRDMA(), x.proof(at, a, b, &all[0])), true
}

func (x *exam) roceMTU(at string, a, b *portFacts) Check {
	name := at + " MTU"
	switch {
	case a.MTU == 0 || b.MTU == 0:
		return unknown(name, "an end does not say")
	case a.MTU == b.MTU:
		return yes(name, fmt.Sprintf("%d at both ends", a.MTU))
	}
	small, large, host := a, b, ""
	if b.MTU < a.MTU {
		small, large, host = b, a, x.name
	}
	c := lacking(name, fmt.Sprintf("%d here, %d there: %d are used", a.MTU, b.MTU, small.MTU), "larger packets cost less each", "")
	if small.Netdev != "" && small.NetdevMTU < large.NetdevMTU {
		c.Command = fmt.Sprintf("ip link set dev %s mtu %d", small.Netdev, large.NetdevMTU)
	}
	c.Host = host
	return c
}

// noWay is about ports that have no kind of address in common.
func (x *exam) noWay(at string, a, b *portFacts) Check {
	kinds := [...]string{cgo.ReachNone: "no RoCE v2 address", cgo.ReachLink: "addresses of the link", cgo.ReachIPv6: "an IPv6 address", cgo.ReachIPv4: "an IPv4 address"}
	c := lacking(at+reachSuffix, fmt.Sprintf("%s here, %s there", kinds[a.reach()], kinds[b.reach()]), "the two need addresses of the same kind", "").forRDMA()
	poor, host := a, ""
	if b.reach() < a.reach() {
		poor, host = b, x.name
	}
	if poor.Netdev != "" {
		c.Command, c.Host = "ip addr add ADDRESS/PREFIX dev "+poor.Netdev, host
	}
	return c
}

// blocked is about ports that do not reach each other by the addresses that count. Where packets were lost, smaller ones may
// tell why.
func (x *exam) blocked(at string, a, b *portFacts, w *way, why error, bad []string) Check {
	if errors.Is(why, cgo.RetryExceeded) && min(a.MTU, b.MTU) > smallMTU {
		if _, _, err := x.send(a, b, w, smallMTU, tryBytes); err == nil {
			return lacking(at+reachSuffix, fmt.Sprintf("packets of %d bytes arrive, packets of %d do not", smallMTU, min(a.MTU, b.MTU)), "a switch between the two drops large packets: raise its MTU to 9216, or lower that of both interfaces",
				"ip link set dev "+a.Netdev+" mtu 1500").forRDMA()
		}
	}
	return lacking(at+reachSuffix, "they do not reach each other: "+strings.Join(bad, "; "), "two rails on two networks need not; else look for a route, a VLAN, and a firewall that drops UDP port 4791", "").forRDMA()
}

// proof writes more, and has the other end look at it.
func (x *exam) proof(at string, a, b *portFacts, w *way) Check {
	name := at + " write"
	took, trip, err := x.send(a, b, w, min(a.MTU, b.MTU), proofBytes)
	switch {
	case errors.Is(err, errAltered):
		return Check{Name: name, Answer: Needed, Detail: err.Error(), Remedy: "memory, card or cable changes bytes: take this port out of use (headrace node --rdma-devices names the others)"}
	case err != nil:
		return lacking(name, fmt.Sprintf("%d MiB: %v", proofBytes>>20, err), "short messages arrive, long ones do not: look at the port's error counters and at flow control", "").forRDMA()
	}
	return yes(name, fmt.Sprintf("%d MiB in %v, as sent (%.0f MB/s); 8 bytes there and back in %v", proofBytes>>20, took.Round(10*time.Microsecond), proofBytes/1e6/took.Seconds(), trip.Round(100*time.Nanosecond))).forRDMA()
}

var errAltered = errors.New("what arrived is not what was sent")

// send writes bytes over a queue pair made for it, and compares.
func (x *exam) send(a, b *portFacts, w *way, mtu uint32, bytes int) (took, trip time.Duration, err error) {
	if mtu == 0 {
		mtu = smallMTU
	}
	use := &pairUsage{Device: a.Device, Port: a.Port, GID: w.own.Index, Text: w.own.Text, MTU: mtu, Bytes: bytes}
	e, err := openEnd(use)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	ans, err := x.ask(&request{Op: "join", End: &e.own, Use: &pairUsage{Device: b.Device, Port: b.Port, GID: w.there.Index, Text: w.there.Text, MTU: mtu, Bytes: bytes}})
	if err != nil || ans.End == nil {
		return 0, 0, fmt.Errorf("the other end cannot: %w", err)
	}
	defer func() {
		_, lerr := x.ask(&request{Op: "leave"})
		err = errors.Join(err, lerr)
	}()
	if err := e.join(use, ans.End); err != nil {
		return 0, 0, err
	}
	if took, err = e.write(ans.End, patience); err != nil {
		return 0, 0, err
	}
	sum, err := x.ask(&request{Op: "sum"})
	if err != nil {
		return 0, 0, err
	}
	if sum.Sum != e.sum() {
		return 0, 0, errAltered
	}
	trip, err = e.trips(ans.End, tripTimes, patience)
	return took, trip, err
}
