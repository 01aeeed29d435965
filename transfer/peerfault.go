package transfer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
)

// To a peer that cannot be reached every request is slow and goes without a transfer, which nobody may notice: each cause is
// said once, with what to do, and stands in the status for as long as it lasts.

const (
	faultsMax  = 1024             // peers
	faultsLast = 10 * time.Minute // after the last failure
)

// peerFault is a peer to which no channel could be opened.
type peerFault struct {
	cause       string
	reason      string
	since, last time.Time
	tries       int
}

var errNoTransport = errors.New("no transport in common")

// faultOf says in a few words why a channel could not be opened, and what helps.
func faultOf(err error, addr string) (cause, help string) {
	var dns *net.DNSError
	var wait net.Error
	switch {
	case addr == "":
		return "its address is not known", "its daemon listens nowhere: give it --listen"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nobody listens there", "is its `headrace node` running, and is this the address it is reached at (--listen, --advertise)?"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH), errors.As(err, &dns):
		return "there is no way to that address", "give its `headrace node` an --advertise that this host reaches"
	case errors.Is(err, handshake.ErrKey):
		return "it has another cluster key", "the same --cluster-key-file for all daemons and routers"
	case errors.Is(err, ErrWrongTicket):
		return "another node has that address", "give each `headrace node` a --listen and --advertise of its own"
	case errors.Is(err, errNoTransport):
		return "no transport in common", "--transport auto for both, or the same one"
	case errors.Is(err, handshake.ErrSuccessor):
		return "it is being replaced", "nothing; if it stays so, look at its log"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &wait) && wait.Timeout():
		return "no answer in time", "a firewall between the hosts, a daemon that is stopped, or a machine that is overloaded: `headrace doctor --peer " + addr + "`"
	}
	return "it could not be set up", "`headrace doctor --peer " + addr + "` says what the two hosts lack"
}

// noteFault remembers how the last attempt to open a channel ended. The caller holds e.mu.
func (e *Engine) noteFault(node, addr string, err error) {
	old := e.faults[node]
	switch {
	case err == nil:
		if old != nil {
			e.log.Info("peer can be reached again", "peer", node, "addr", addr, "failed before", old.tries)
			delete(e.faults, node)
		}
		return
	case errors.Is(err, ErrVersion), e.ctx.Err() != nil: // said by noteSkew; or nobody cares any more
		return
	}
	now := time.Now()
	cause, help := faultOf(err, addr)
	if old == nil || now.Sub(old.last) > faultsLast {
		e.forgetFaults(now)
		if len(e.faults) >= faultsMax {
			return
		}
		old = &peerFault{since: now}
		e.faults[node] = old
	}
	if old.cause != cause {
		e.log.Warn("no channel to a peer: prompts that it is to take are computed where they are decoded", "peer", node, "addr", addr, "why", cause, "do", help, "error", err)
	}
	old.cause, old.last = cause, now
	old.reason = fmt.Sprintf("no channel to node %s at %s: %s; %s", node, addr, cause, help)
	old.tries++
}

// forgetFaults forgets peers that were not tried for long. The caller holds e.mu.
func (e *Engine) forgetFaults(now time.Time) {
	for node, f := range e.faults {
		if now.Sub(f.last) > faultsLast {
			delete(e.faults, node)
		}
	}
}
