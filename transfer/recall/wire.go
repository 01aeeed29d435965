package recall

import (
	"encoding/binary"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/headrace/headrace/transfer/handshake"
	"github.com/headrace/headrace/transfer/ticket"
)

// What is said after the handshake, any number of times, one request at a time:
//
//	offset size field
//	     0    4 magic "HRRC"
//	     4    2 version, 1 or 2
//	     6    2 n: number of tickets, 1 to 64
//	     8    2 r: size of the reason, at most 512
//	    10    2 what is asked: see Kind; 0 in version 1
//	    12    4 reserved, 0
//	    16 352n tickets
//	     .    r reason, UTF-8
//
// and the answer, when all of them are void and fenced, or looked at:
//
//	offset size field
//	     0    4 magic "HRRA"
//	     4    2 version, 1
//	     6    2 n: number of tickets
//	     8    n verdicts, in the order of the tickets
const (
	// TicketsMax is the most tickets of one request, and ReasonMax the most bytes of its reason.
	TicketsMax = 64
	ReasonMax  = 512

	requestSize = 16
	answerSize  = 8
	versionVoid = 1 // knows KindVoid alone, and nothing that needs it is said in another
	versionKind = 2
)

var (
	requestMagic = [4]byte{'H', 'R', 'R', 'C'}
	answerMagic  = [4]byte{'H', 'R', 'R', 'A'}
	le           = binary.LittleEndian
)

// Kind is what is asked of a daemon.
type Kind uint16

// The kinds. A daemon of before KindIdle closes a connection over which another kind than KindVoid is asked.
const (
	// KindVoid makes tickets void, whatever has become of them.
	KindVoid Kind = iota
	// KindIdle makes those void that nobody has presented at D's daemon, and touches no other: their lease's end is told
	// to D's engine when it comes.
	KindIdle
	// KindLook asks P's daemon which it has a living lease of, and changes nothing.
	KindLook
	kindCount
)

var kindNames = [...]string{KindVoid: "recall", KindIdle: "recall if nobody presented", KindLook: "look for"}

func (k Kind) String() string {
	if k < kindCount {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint16(k))
}

// Verdict is what became of a ticket.
type Verdict uint8

// The verdicts.
const (
	Remembered Verdict = 1 + iota // nobody had presented it: it will be refused when somebody does
	Revoked                       // it was presented or bound: its lease has ended, and D's side is fenced
	Ended                         // it was used up before, here or at this daemon's predecessor
	Refused                       // it is not authentic, another node's, or past its deadline: nothing was done
	Full                          // as many tickets are remembered as can be: nothing was done
	Living                        // it is presented, bound, or waits for its engine to attach; at P's daemon: its lease lives. Nothing was done
	Absent                        // P's daemon has no living lease of it
	verdictCount
)

var verdictNames = [...]string{Remembered: "remembered", Revoked: "revoked", Ended: "ended before", Refused: "refused", Full: "cannot be remembered",
	Living: "living", Absent: "absent"}

func (v Verdict) String() string {
	if int(v) < len(verdictNames) && v != 0 {
		return verdictNames[v]
	}
	return fmt.Sprintf("verdict(%d)", uint8(v))
}

// Request is about tickets.
type Request struct {
	Kind    Kind
	Tickets [][]byte // each of ticket.Size bytes
	Reason  string
}

// Append appends the request's bytes. It must be within the limits.
func (r *Request) Append(b []byte) []byte {
	b = append(b, requestMagic[:]...)
	b = le.AppendUint16(b, versionOf(r.Kind))
	b = le.AppendUint16(b, uint16(len(r.Tickets)))
	b = le.AppendUint16(b, uint16(len(r.Reason)))
	b = le.AppendUint16(b, uint16(r.Kind))
	b = append(b, 0, 0, 0, 0)
	for _, t := range r.Tickets {
		b = append(b, t...)
	}
	return append(b, r.Reason...)
}

// versionOf is the lowest version that knows a kind, so that an older daemon still understands what it can do.
func versionOf(k Kind) uint16 {
	if k == KindVoid {
		return versionVoid
	}
	return versionKind
}

// ReadRequest reads one.
func ReadRequest(src io.Reader) (*Request, error) {
	var head [requestSize]byte
	if _, err := io.ReadFull(src, head[:]); err != nil {
		return nil, err
	}
	n, reason, kind := int(le.Uint16(head[6:])), int(le.Uint16(head[8:])), Kind(le.Uint16(head[10:]))
	if [4]byte(head[:]) != requestMagic || n == 0 || n > TicketsMax || reason > ReasonMax || kind >= kindCount || le.Uint16(head[4:]) != versionOf(kind) || [4]byte(head[12:]) != [4]byte{} {
		return nil, fmt.Errorf("%w: recall begins with %x", handshake.ErrProtocol, head)
	}
	body := make([]byte, n*ticket.Size+reason)
	if _, err := io.ReadFull(src, body); err != nil {
		return nil, fmt.Errorf("read recall: %w", err)
	}
	r := &Request{Kind: kind}
	for range n {
		r.Tickets, body = append(r.Tickets, body[:ticket.Size]), body[ticket.Size:]
	}
	if !utf8.Valid(body) {
		return nil, fmt.Errorf("%w: reason of a recall is not UTF-8", handshake.ErrProtocol)
	}
	r.Reason = string(body)
	return r, nil
}

// AppendAnswer appends the bytes of an answer.
func AppendAnswer(b []byte, verdicts []Verdict) []byte {
	b = append(b, answerMagic[:]...)
	b = le.AppendUint16(b, versionVoid)
	b = le.AppendUint16(b, uint16(len(verdicts)))
	for _, v := range verdicts {
		b = append(b, byte(v))
	}
	return b
}

// readAnswer reads the answer to a request of n tickets.
func readAnswer(src io.Reader, n int) ([]Verdict, error) {
	b := make([]byte, answerSize+n)
	if _, err := io.ReadFull(src, b); err != nil {
		return nil, fmt.Errorf("read the answer to a recall: %w", err)
	}
	if [4]byte(b) != answerMagic || le.Uint16(b[4:]) != versionVoid || int(le.Uint16(b[6:])) != n {
		return nil, fmt.Errorf("%w: the answer to a recall of %d tickets begins with %x", handshake.ErrProtocol, n, b[:answerSize])
	}
	out := make([]Verdict, n)
	for i, v := range b[answerSize:] {
		if out[i] = Verdict(v); out[i] < Remembered || out[i] >= verdictCount {
			return nil, fmt.Errorf("%w: verdict %d", handshake.ErrProtocol, v)
		}
	}
	return out, nil
}
