package node

import (
	"errors"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
	"github.com/headrace/headrace/transfer/ticket"
)

// codes is in order: an error that wraps several takes the first.
var codes = []struct {
	err  error
	code wire.Code
}{
	{ticket.ErrBadMAC, wire.CodeBadTicket},
	{ticket.ErrMalformed, wire.CodeBadTicket},
	{ticket.ErrExpired, wire.CodeExpired},
	{transfer.ErrWrongTicket, wire.CodeWrongTicket},
	{transfer.ErrTicketUsed, wire.CodeTicketUsed},
	{transfer.ErrNotPresented, wire.CodeNotPresented},
	{transfer.ErrUnknownLease, wire.CodeUnknownLease},
	{transfer.ErrLeaseEnded, wire.CodeLeaseEnded},
	{transfer.ErrUnknownRegion, wire.CodeUnknownRegion},
	{transfer.ErrAttached, wire.CodeAttached},
	{transfer.ErrLimit, wire.CodeLimit},
	{transfer.ErrLayout, wire.CodeLayout},
	{transfer.ErrPlan, wire.CodePlan},
	{transfer.ErrRegion, wire.CodeRegion},
	{transfer.ErrRanksMissing, wire.CodeRanksMissing},
	{transfer.ErrDenied, wire.CodeDenied},
	{transfer.ErrInvalid, wire.CodeInvalid},
	{transfer.ErrDraining, wire.CodeDraining},
	{transfer.ErrClosed, wire.CodeShutdown},
	{transfer.ErrClientClosed, wire.CodeShutdown},
}

// refusal turns an error into what travels.
func refusal(err error) *wire.Error {
	var e *wire.Error
	if errors.As(err, &e) {
		return e
	}
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return wire.Errorf(c.code, "%v", err)
		}
	}
	return wire.Errorf(wire.CodeInternal, "%v", err)
}

var eventTypes = map[transfer.EventKind]wire.Type{
	transfer.EventPresented: wire.TypePresented,
	transfer.EventBound:     wire.TypeBound,
	transfer.EventRefused:   wire.TypeRefused,
	transfer.EventPushed:    wire.TypePushed,
	transfer.EventSettled:   wire.TypeSettled,
	transfer.EventEnded:     wire.TypeEnded,
}

func toWire(ev transfer.Event) (wire.Event, error) {
	w := wire.Event{
		Kind: eventTypes[ev.Kind], Lease: uint64(ev.Lease), Nonce: ev.Nonce, Seq: ev.Seq, Code: uint16(ev.State),
		Tokens: ev.Tokens, FirstToken: ev.FirstToken, Text: wire.Cut(ev.Reason),
	}
	switch ev.Kind {
	case transfer.EventPresented:
		for _, l := range ev.Layouts {
			var err error
			if w.Layouts, err = l.AppendBinary(w.Layouts); err != nil {
				return w, err
			}
		}
		w.Text, w.Data = ev.PEngine, ev.Meta
	case transfer.EventSettled:
		w.Data = ev.Record
	}
	return w, nil
}
