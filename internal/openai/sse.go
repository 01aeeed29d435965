package openai

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
)

// EventBytesMax bounds one event between router and worker.
const EventBytesMax = 8 << 20

// EventKind says what a worker's event is.
type EventKind uint8

// The events of the native dialect. EventComment is a comment nobody here knows: newer workers may send more of them.
const (
	EventComment   EventKind = iota
	EventData                // data: {...}
	EventDone                // data: [DONE]
	EventTokens              // : t 1,2,3
	EventPrior               // : prior 1,2,3
	EventHeartbeat           // : hb
	EventPhase               // : phase NAME
	EventHandoff             // : handoff
	EventSettled             // : settled
	EventFinal               // : final
	EventFailed              // : failed REASON
	EventHead                // : head, before a data event that comes before all tokens
	EventStays               // : stays REASON, of a stream that was to move on
)

// Event is one event. Its slices point into the buffer it was read from.
type Event struct {
	Kind EventKind
	Raw  []byte // all of it with its empty line, as to be forwarded
	Arg  []byte // the JSON of data, the token list, the phase or the reason
}

// ErrEventTooLarge is returned for an event over EventBytesMax.
var ErrEventTooLarge = errors.New("read event: larger than the limit")

// ErrMalformedEvent is returned for bytes that are no event of the dialect.
var ErrMalformedEvent = errors.New("read event: malformed")

// NextEvent takes the first event off b and says how many bytes it used. n is 0 while b does not hold a whole event.
// An event is one line, ended by an empty one: the dialect's workers never write events of several lines.
func NextEvent(b []byte) (ev Event, n int, err error) {
	skip := 0
	for skip < len(b) && b[skip] == '\n' {
		skip++
	}
	end := bytes.IndexByte(b[skip:], '\n')
	if end < 0 || skip+end+1 >= len(b) {
		return Event{}, 0, nil
	}
	line := b[skip : skip+end]
	if b[skip+end+1] != '\n' {
		return Event{}, 0, fmt.Errorf("%w: %.40q", ErrMalformedEvent, b[skip:])
	}
	n = skip + end + 2
	ev = Event{Raw: b[skip:n]}
	if arg, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
		ev.Kind, ev.Arg = EventData, arg
		if string(arg) == "[DONE]" {
			ev.Kind = EventDone
		}
		return ev, n, nil
	}
	if line[0] != ':' {
		return Event{}, 0, fmt.Errorf("%w: %.40q", ErrMalformedEvent, line)
	}
	ev.Kind, ev.Arg = comment(line)
	return ev, n, nil
}

func comment(line []byte) (EventKind, []byte) {
	body := bytes.TrimPrefix(line[1:], []byte(" "))
	name, arg, _ := bytes.Cut(body, []byte(" "))
	switch string(name) {
	case "t":
		return EventTokens, arg
	case "prior":
		return EventPrior, arg
	case "hb":
		return EventHeartbeat, arg
	case "phase":
		return EventPhase, arg
	case "handoff":
		return EventHandoff, arg
	case "settled":
		return EventSettled, arg
	case "final":
		return EventFinal, arg
	case "failed":
		return EventFailed, arg
	case "head":
		return EventHead, arg
	case "stays":
		return EventStays, arg
	}
	return EventComment, body
}

// AppendTokens appends the ids of an EventTokens' or EventPrior's argument.
func AppendTokens(dst []int32, arg []byte) ([]int32, error) {
	for len(arg) > 0 {
		id, rest, more := bytes.Cut(arg, []byte(","))
		n, err := strconv.ParseInt(string(id), 10, 32)
		if err != nil || n < 0 || (more && len(rest) == 0) {
			return dst, fmt.Errorf("%w: token id %.20q", ErrMalformedEvent, id)
		}
		dst = append(dst, int32(n))
		arg = rest
	}
	return dst, nil
}

// AppendComment appends an event without data. Line ends in arg become spaces.
func AppendComment(dst []byte, name, arg string) []byte {
	dst = append(dst, ": "...)
	dst = append(dst, name...)
	if arg != "" {
		dst = append(dst, ' ')
		for i := range len(arg) {
			c := arg[i]
			if c == '\n' || c == '\r' {
				c = ' '
			}
			dst = append(dst, c)
		}
	}
	return append(dst, "\n\n"...)
}

// AppendTokenComment appends ": t 1,2,3", or another name's list.
func AppendTokenComment(dst []byte, name string, ids []int32) []byte {
	dst = append(dst, ": "...)
	dst = append(dst, name...)
	for i, id := range ids {
		sep := byte(',')
		if i == 0 {
			sep = ' '
		}
		dst = append(dst, sep)
		dst = strconv.AppendInt(dst, int64(id), 10)
	}
	return append(dst, "\n\n"...)
}
