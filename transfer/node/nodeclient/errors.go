package nodeclient

import (
	"errors"
	"fmt"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
	"github.com/headrace/headrace/transfer/ticket"
)

// sentinels are what a refusal's code stands for, so that errors.Is works across the socket.
var sentinels = map[wire.Code]error{
	wire.CodeAttached: transfer.ErrAttached, wire.CodeRegion: transfer.ErrRegion, wire.CodeLayout: transfer.ErrLayout,
	wire.CodePlan: transfer.ErrPlan, wire.CodeUnknownRegion: transfer.ErrUnknownRegion, wire.CodeUnknownLease: transfer.ErrUnknownLease,
	wire.CodeLeaseEnded: transfer.ErrLeaseEnded, wire.CodeNotPresented: transfer.ErrNotPresented, wire.CodeTicketUsed: transfer.ErrTicketUsed,
	wire.CodeWrongTicket: transfer.ErrWrongTicket, wire.CodeBadTicket: ticket.ErrBadMAC, wire.CodeExpired: ticket.ErrExpired,
	wire.CodeLimit: transfer.ErrLimit, wire.CodeInvalid: transfer.ErrInvalid, wire.CodeShutdown: transfer.ErrClosed, wire.CodeDraining: transfer.ErrDraining, wire.CodeVersion: ErrVersion,
	wire.CodeRanksMissing: transfer.ErrRanksMissing, wire.CodeDenied: transfer.ErrDenied,
}

// Refused is the daemon's no. errors.Is finds the transfer or ticket error behind its code; errors.As finds the *wire.Error with the code.
type Refused struct{ Reply *wire.Error }

func (r *Refused) Error() string { return r.Reply.Text }

// Unwrap gives the error of this side that the code stands for, and the refusal as it came.
func (r *Refused) Unwrap() []error {
	if s := sentinels[r.Reply.Code]; s != nil {
		return []error{s, r.Reply}
	}
	return []error{r.Reply}
}

func fromWire(e *wire.Error) error { return &Refused{e} }

// fromError is for requests refused before they are sent: they look as if the daemon had.
func fromError(err error) error {
	var e *wire.Error
	if errors.As(err, &e) {
		return fromWire(e)
	}
	return err
}

var eventKinds = map[wire.Type]transfer.EventKind{
	wire.TypePresented: transfer.EventPresented,
	wire.TypeBound:     transfer.EventBound,
	wire.TypeRefused:   transfer.EventRefused,
	wire.TypePushed:    transfer.EventPushed,
	wire.TypeSettled:   transfer.EventSettled,
	wire.TypeEnded:     transfer.EventEnded,
}

func fromEvent(w wire.Event) (transfer.Event, error) {
	ev := transfer.Event{
		Kind: eventKinds[w.Kind], State: transfer.LeaseState(w.Code), Lease: transfer.LeaseID(w.Lease), Nonce: w.Nonce,
		Seq: w.Seq, Tokens: w.Tokens, FirstToken: w.FirstToken,
	}
	switch w.Kind {
	case wire.TypePresented:
		for b := w.Layouts; len(b) > 0; {
			n := min(len(b), transfer.LayoutSize)
			l, err := transfer.UnmarshalLayout(b[:n])
			if err != nil {
				return ev, fmt.Errorf("layouts in PRESENTED: %w", err)
			}
			ev.Layouts, b = append(ev.Layouts, l), b[n:]
		}
		ev.PEngine, ev.Meta = w.Text, w.Data
	case wire.TypeSettled:
		ev.Record = w.Data
	default:
		ev.Reason = w.Text
	}
	return ev, nil
}
