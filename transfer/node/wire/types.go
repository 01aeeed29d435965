package wire

import (
	"fmt"
	"unicode/utf8"
)

// Magic starts every frame: "HRU1" as bytes on the wire.
const Magic = 0x31555248

// HeaderLen is the size of the header before each payload.
const HeaderLen = 24

// The versions this code speaks. HELLO carries the sender's range, HELLO_OK the one chosen.
var VersionMin, VersionMax = spoken(versions, 2, 2)

// versions is a build's override of them, "LOW-HIGH", set by the linker: for tests of skew.
var versions string

func spoken(override string, low, high uint16) (uint16, uint16) {
	if n, err := fmt.Sscanf(override, "%d-%d", &low, &high); override != "" && (n != 2 || err != nil) {
		panic("wire: versions must be LOW-HIGH")
	}
	return low, high
}

// Limits of one message. HELLO_OK announces the payload limit; the others are part of the version.
const (
	MaxPayload = 2 << 20 // bytes after the header
	MaxRecord  = 1 << 20 // bytes of a hand-off record
	MaxMeta    = 64 << 10
	MaxBlocks  = 1 << 16 // block ids in PRESENT, EXTEND or BIND
	MaxUnits   = 1 << 16 // units in PUSH
	MaxRegions = 64      // of a shard set, in PRESENT or BIND
	MaxTicket  = 512
	MaxName    = 255 // bytes of an engine id, node id, address
	MaxText    = 1024
	MaxLayout  = 4096
	MaxLayouts = 64 << 10 // of a shard set, in PRESENTED
	MaxAbout   = 16 << 10 // of what an engine says of itself
	MaxStatus  = MaxPayload - 8
)

// Type says what a payload is.
type Type uint16

// Requests, engine to daemon. Each carries a request id that is not zero and is answered once.
const (
	TypeHello          Type = 0x01
	TypeRegisterRegion Type = 0x02
	TypeRemoveRegion   Type = 0x03
	TypePresent        Type = 0x04
	TypePush           Type = 0x05
	TypeHandoff        Type = 0x06
	TypeBind           Type = 0x07
	TypeRefuse         Type = 0x08
	TypeRevoke         Type = 0x09
	TypePing           Type = 0x0a
	TypeStatus         Type = 0x0b
	TypeSetupRing      Type = 0x0c
	TypeRegisterDMABuf Type = 0x0d
	TypeExtend         Type = 0x0e
	TypeJoin           Type = 0x0f
	TypeDescribe       Type = 0x10
)

// Answers, daemon to engine, carrying the id of their request.
const (
	TypeHelloOK  Type = 0x41
	TypeOK       Type = 0x42
	TypeError    Type = 0x43
	TypePong     Type = 0x44
	TypeStatusOK Type = 0x45
)

// Events, daemon to engine, with request id zero.
const (
	TypePresented Type = 0x81
	TypeBound     Type = 0x82
	TypeRefused   Type = 0x83
	TypePushed    Type = 0x84
	TypeSettled   Type = 0x85
	TypeEnded     Type = 0x86
	TypeGoodbye   Type = 0x87
	TypeDraining  Type = 0x88
)

var typeNames = map[Type]string{
	TypeHello: "HELLO", TypeRegisterRegion: "REGISTER_REGION", TypeRemoveRegion: "REMOVE_REGION",
	TypePresent: "PRESENT", TypePush: "PUSH", TypeHandoff: "HANDOFF", TypeBind: "BIND",
	TypeRefuse: "REFUSE", TypeRevoke: "REVOKE", TypePing: "PING", TypeStatus: "STATUS", TypeSetupRing: "SETUP_RING",
	TypeRegisterDMABuf: "REGISTER_DMABUF", TypeExtend: "EXTEND", TypeJoin: "JOIN", TypeDescribe: "DESCRIBE",
	TypeHelloOK: "HELLO_OK", TypeOK: "OK", TypeError: "ERROR", TypePong: "PONG", TypeStatusOK: "STATUS_OK",
	TypePresented: "PRESENTED", TypeBound: "BOUND", TypeRefused: "REFUSED", TypePushed: "PUSHED",
	TypeSettled: "SETTLED", TypeEnded: "ENDED", TypeGoodbye: "GOODBYE", TypeDraining: "DRAINING",
}

func (t Type) String() string {
	if s, ok := typeNames[t]; ok {
		return s
	}
	return fmt.Sprintf("type %#x", uint16(t))
}

// IsEvent tells events, which answer no request, from answers.
func (t Type) IsEvent() bool { return t >= TypePresented && t <= TypeDraining }

// IsRequest tells what an engine may send.
func (t Type) IsRequest() bool { return t >= TypeHello && t <= TypeDescribe }

// FlagQuiet on a PUSH asks for no OK: only a refusal is answered. It saves engines that push every
// layer an answer they would not look at; the PUSHED event comes all the same.
const FlagQuiet uint32 = 1

// Code is the reason class of an ERROR or GOODBYE, for programs; the text beside it is for people.
type Code uint16

// The codes. Unknown ones are to be treated like CodeInternal.
const (
	CodeVersion       Code = 1  // no version in common
	CodeMalformed     Code = 2  // the payload does not parse
	CodeUnknownType   Code = 3  // a message type this side does not know
	CodeFraming       Code = 4  // bad magic or a length above the limit: the connection is closed after this
	CodeDescriptor    Code = 5  // descriptors missing, surplus or truncated
	CodeState         Code = 6  // HELLO missing or repeated
	CodeAttached      Code = 7  // the engine id is attached by another live connection
	CodeBusy          Code = 8  // more requests in flight than HELLO_OK allows
	CodeRegion        Code = 9  // memory refused: not sealed, too small, not a memfd
	CodeLayout        Code = 10 // layout refused: overlap, overflow or out of bounds
	CodePlan          Code = 11 // no copy plan between the two layouts
	CodeUnknownRegion Code = 12 // no such region
	CodeUnknownLease  Code = 13 // no such lease, or none any more
	CodeLeaseEnded    Code = 14 // the lease has ended
	CodeNotPresented  Code = 15 // the ticket has not been presented
	CodeTicketUsed    Code = 16 // the ticket was bound or refused before
	CodeWrongTicket   Code = 17 // the ticket is made out to another node or engine
	CodeBadTicket     Code = 18 // the ticket is malformed or not authentic
	CodeExpired       Code = 19 // a deadline passed
	CodeLimit         Code = 20 // a limit of the daemon would be exceeded
	CodeInvalid       Code = 21 // the request makes no sense as it stands
	CodeShutdown      Code = 22 // the daemon is stopping
	CodeDenied        Code = 23 // peer credentials refused
	CodeSlow          Code = 24 // the engine did not read its events, or was silent too long
	CodeInternal      Code = 25 // anything else
	CodeDraining      Code = 26 // the daemon gives way to its successor: connect again
	CodeRanksMissing  Code = 27 // a rank of the engine has not lent its region yet: try again
)

var codeNames = [...]string{
	CodeVersion:       "version",
	CodeMalformed:     "malformed",
	CodeUnknownType:   "unknown-type",
	CodeFraming:       "framing",
	CodeDescriptor:    "descriptor",
	CodeState:         "state",
	CodeAttached:      "attached",
	CodeBusy:          "busy",
	CodeRegion:        "region",
	CodeLayout:        "layout",
	CodePlan:          "plan",
	CodeUnknownRegion: "unknown-region",
	CodeUnknownLease:  "unknown-lease",
	CodeLeaseEnded:    "lease-ended",
	CodeNotPresented:  "not-presented",
	CodeTicketUsed:    "ticket-used",
	CodeWrongTicket:   "wrong-ticket",
	CodeBadTicket:     "bad-ticket",
	CodeExpired:       "expired",
	CodeLimit:         "limit",
	CodeInvalid:       "invalid",
	CodeShutdown:      "shutdown",
	CodeDenied:        "denied",
	CodeSlow:          "slow",
	CodeInternal:      "internal",
	CodeDraining:      "draining",
	CodeRanksMissing:  "ranks-missing",
}

func (c Code) String() string {
	if int(c) < len(codeNames) && codeNames[c] != "" {
		return codeNames[c]
	}
	return fmt.Sprintf("code %d", uint16(c))
}

// Error is a refusal as it travels: a code and a text.
type Error struct {
	Code Code
	Text string
}

func (e *Error) Error() string { return e.Text }

// Is matches another *Error of the same code, so that errors.Is(err, &Error{Code: c}) works.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code && (t.Text == "" || t.Text == e.Text)
}

// Errorf makes an Error, cut to what the wire carries.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Text: Cut(fmt.Sprintf(format, args...))}
}

// Cut shortens a text to what the wire carries, at a rune's border.
func Cut(s string) string {
	if len(s) <= MaxText {
		return s
	}
	n := MaxText
	for n > MaxText-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
