package dialects

import (
	"encoding/hex"
	"fmt"
	"time"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/transfer/ticket"
)

// mint makes the ticket of a dispatch to a pair.
func (a *Attempt) mint(key []byte) (minted []byte, err error) {
	minted, a.Ticket, err = mintTicket(key, a.Decision.Prefill, a.Decision.Decode, a.Request.Deadline)
	return minted, err
}

// mintTicket makes a ticket for KV cache that goes from one worker to another.
func mintTicket(key []byte, p, d *pairing.Worker, deadline time.Time) (minted []byte, nonce [16]byte, err error) {
	t := ticket.Ticket{Nonce: ticket.NewNonce(), PNode: p.NodeID, DNode: d.NodeID, PEngine: p.ID, DEngine: d.ID, Deadline: deadline}
	if k, err := hex.DecodeString(p.Fingerprint); err != nil || copy(t.Fingerprint[:], k) != len(t.Fingerprint) || len(k) != len(t.Fingerprint) {
		return nil, nonce, fmt.Errorf("mint ticket: worker %s registered fingerprint %q, need %d bytes in hex", p.ID, p.Fingerprint, len(t.Fingerprint))
	}
	if err := t.Validate(); err != nil {
		return nil, nonce, fmt.Errorf("mint ticket for %s and %s: %w", p.ID, d.ID, err)
	}
	return ticket.Mint(key, t), t.Nonce, nil
}

// unminted is the outcome where there could be no ticket.
func unminted(d pairing.Decision, err error) *Outcome {
	return &Outcome{Result: Failed, Reason: "ticket", Err: err, FaultAt: time.Now(), Undialled: true, Blame: []Blame{
		{Worker: d.Prefill.ID, Reason: err.Error(), Pair: true}, {Worker: d.Decode.ID, Reason: err.Error(), Pair: true}}}
}
