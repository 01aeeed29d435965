package dialects

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/headrace/headrace/internal/openai"
)

// What an event of a leg means for the attempt.
type news uint8

const (
	newsNone news = iota
	newsHandoff
	newsSettled // it has sent all that the other needs, and lets go of the stream
	newsLoaded  // it has all that it needs
	newsDecoding
	newsFinal
	newsFailed
	newsStays
)

var errPrior = errors.New("decode goes on from other tokens than the client was given")

// splice turns the events of an attempt's legs, taken in the order in which the client is to see them, into the
// client's stream.
//
// The finish and usage events are kept back until the leg says final: a leg that dies between the two has not
// finished, and the next one says it again.
type splice struct {
	sink     Sink
	progress *Progress
	pending  []int32 // announced, no data event yet
	prior    []int32 // scratch
	tail     []byte  // finish and usage events
	reason   []byte  // of newsFailed and newsStays
	head     bool    // the next data event comes before all tokens
}

// sinkError is a failure of the client's side.
type sinkError struct{ error }

// take handles one event.
func (s *splice) take(ev openai.Event) (news, error) {
	switch ev.Kind {
	case openai.EventData:
		return newsNone, s.data(ev)
	case openai.EventHead:
		s.head = true
	case openai.EventTokens:
		var err error
		s.pending, err = openai.AppendTokens(s.pending, ev.Arg)
		return newsNone, err
	case openai.EventPrior:
		return newsDecoding, s.checkPrior(ev.Arg)
	case openai.EventPhase:
		switch string(ev.Arg) {
		case "settled":
			return newsLoaded, nil
		case "decoding":
			return newsDecoding, nil
		}
	case openai.EventHandoff:
		return newsHandoff, nil
	case openai.EventSettled:
		return newsSettled, nil
	case openai.EventFinal:
		return newsFinal, s.final()
	case openai.EventFailed:
		s.reason = append(s.reason[:0], ev.Arg...)
		return newsFailed, nil
	case openai.EventStays:
		s.reason = append(s.reason[:0], ev.Arg...)
		return newsStays, nil
	}
	return newsNone, nil
}

func (s *splice) data(ev openai.Event) error {
	if bytes.HasPrefix(ev.Arg, []byte(`{"error"`)) {
		return fmt.Errorf("worker says %.200s", ev.Arg)
	}
	kind := kindOf(ev.Arg)
	if s.head {
		kind, s.head = KindRole, false
	}
	switch {
	case kind == KindRole && len(s.tail) == 0:
		if s.progress.RoleSent {
			return nil
		}
		s.progress.RoleSent = true
		return s.forward(KindRole, ev, 0)
	case kind == KindFinish || kind == KindUsage || len(s.tail) > 0:
		s.tail = append(s.tail, ev.Raw...)
		return nil
	}
	if err := s.forward(KindText, ev, len(s.pending)); err != nil {
		return err
	}
	s.commit()
	return nil
}

func (s *splice) forward(k Kind, ev openai.Event, tokens int) error {
	if err := s.sink.Event(k, ev.Raw, ev.Arg, tokens); err != nil {
		return sinkError{err}
	}
	return nil
}

func (s *splice) commit() {
	s.progress.Given = append(s.progress.Given, s.pending...)
	s.pending = s.pending[:0]
}

func (s *splice) checkPrior(arg []byte) error {
	var err error
	if s.prior, err = openai.AppendTokens(s.prior[:0], arg); err != nil {
		return err
	}
	n := len(s.progress.Given)
	if len(s.prior) != n+len(s.pending) || !slices.Equal(s.prior[:n], s.progress.Given) || !slices.Equal(s.prior[n:], s.pending) {
		return errPrior
	}
	return nil
}

// final hands on what was kept back.
func (s *splice) final() error {
	if len(s.tail) == 0 {
		return errors.New("worker says final without a finish reason")
	}
	for rest := s.tail; len(rest) > 0; {
		ev, n, err := openai.NextEvent(rest)
		if err != nil || n == 0 {
			return fmt.Errorf("read events kept back: %w", err)
		}
		if err := s.forward(kindOf(ev.Arg), ev, len(s.pending)); err != nil {
			return err
		}
		s.commit()
		rest = rest[n:]
	}
	s.tail = s.tail[:0]
	return nil
}

// kindOf tells what a chunk is without parsing it. Text cannot look like a member: quotes within strings are escaped.
func kindOf(data []byte) Kind {
	switch {
	case openai.IsUsage(data):
		return KindUsage
	case finishes(data):
		return KindFinish
	case bytes.Contains(data, []byte(`"role":"assistant"`)) && bytes.Contains(data, []byte(`"content":""`)):
		return KindRole
	}
	return KindText
}

// finishes tells whether a chunk has a finish reason.
func finishes(data []byte) bool {
	i := bytes.LastIndex(data, []byte(`"finish_reason":`))
	if i < 0 {
		return false
	}
	rest := bytes.TrimLeft(data[i+len(`"finish_reason":`):], " ")
	return !bytes.HasPrefix(rest, []byte("null"))
}
