// Package handshake begins every connection to a node daemon's data address: a channel's control connection or lane, an
// examination, a recall. Both ends prove that they hold the cluster key without
// sending it: each answers the other's nonce with an HMAC-SHA256 under the key over everything said so far. Byte order is
// little-endian. A name field is one length byte, then the bytes, then zeros.
//
// 1. The dialling end sends HELLO:
//
//	offset size field
//	     0    8 magic "HEADRACE"
//	     8    2 lowest protocol version it speaks
//	    10    2 highest
//	    12    2 kind: 1 control, 2 lane, 3 lane of the transport that carries on where the channel's own has no lane, 4 examination, 5 recall
//	    14    2 lane, 0 in other connections than lanes
//	    16   16 channel: random, drawn by the dialling end, the same on a channel's control connection and lanes
//	    32   32 nonce
//	    64   64 node id, a name field
//	   128    8 epoch of its daemon
//	   136   64 transports it can use, names joined by commas, a name field
//	   200
//
// 2. The accepting end answers CHALLENGE:
//
//	offset size field
//	     0    8 magic "HEADRACE"
//	     8    2 version chosen: the highest both speak; 0 with status 1
//	    10    2 status: 0 go on, 1 no common version, 2 full. Other than 0, it closes the connection
//	    12    2 with status 1: lowest version it speaks; else 0
//	    14    2 with status 1: highest; else 0
//	    16   32 nonce
//	    48   64 node id, a name field
//	   112    8 epoch
//	   120   64 transports, a name field
//	   184   32 HMAC(key, "headrace 1 accept" + HELLO + CHALLENGE[0:184])
//	   216
//
// 3. The dialling end answers PROOF:
//
//	offset size field
//	     0   32 HMAC(key, "headrace 1 dial" + HELLO + CHALLENGE)
//	    32
//
// 4. The accepting end answers READY:
//
//	offset size field
//	     0    2 status: 0 go on, 2 full, 3 not expected (no such channel, or the lane is there), 4 wrong proof
//	     2    2 reserved, 0
//	     4
//
// What follows is not encrypted: the network between daemons is trusted with the KV cache, not with the right to write.
package handshake

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"unicode/utf8"

	"github.com/headrace/headrace/transfer/ticket"
)

const (
	helloSize     = 200
	challengeSize = 216
	proofSize     = 32
	readySize     = 4

	labelAccept = "headrace 1 accept"
	labelDial   = "headrace 1 dial"

	// TransportsField is the width of the field that names transports.
	TransportsField = 64
)

// Kinds of connections.
const (
	KindControl = 1
	KindLane    = 2
	KindSpare   = 3 // a lane of the transport that carries on where the channel's own has no lane
	KindExam    = 4
	KindRecall  = 5
)

// What the accepting end answers: those that are its caller's to choose.
const (
	StatusOK          = 0
	statusNoVersion   = 1
	StatusFull        = 2
	StatusNotExpected = 3
	statusWrongProof  = 4
)

// versions is a build's override of the versions it speaks, "LOW-HIGH", set by the linker: for tests of skew.
var versions string

// Versions are those of the protocol between daemons that this build speaks.
func Versions() (low, high uint16) { return versionMin, versionMax }

var versionMin, versionMax = spoken(versions, 2, 2)

func spoken(override string, low, high uint16) (uint16, uint16) {
	if n, err := fmt.Sscanf(override, "%d-%d", &low, &high); override != "" && (n != 2 || err != nil) {
		panic("handshake: versions must be LOW-HIGH")
	}
	return low, high
}

// ErrVersion says that two daemons have no protocol version in common.
var ErrVersion = errors.New("no protocol version in common")

// skew says who speaks what and who is to be upgraded.
func skew(peer string, low, high uint16) error {
	who := "upgrade node " + peer
	if high > versionMax {
		who = "upgrade this node"
	}
	return fmt.Errorf("%w: %w: this daemon speaks versions %d to %d of the protocol between daemons, node %s %d to %d: %s",
		ErrHandshake, ErrVersion, versionMin, versionMax, peer, low, high, who)
}

var helloMagic = [8]byte{'H', 'E', 'A', 'D', 'R', 'A', 'C', 'E'}

// ErrProtocol says that the other end breaks the protocol.
var ErrProtocol = errors.New("protocol violation")

// ErrSuccessor says that another life of the peer answers than the one that was dialled.
var ErrSuccessor = errors.New("another daemon may answer there by now")

// ErrHandshake says why two daemons could not agree to speak.
var ErrHandshake = errors.New("shake hands")

// ErrKey says that the two ends do not hold the same key.
var ErrKey = errors.New("the peer has another cluster key")

var statusWords = map[uint16]string{
	StatusFull:        "the peer has too many connections",
	StatusNotExpected: "the peer does not expect this connection", statusWrongProof: "the peer has another cluster key",
}

// Identity is what a daemon says of itself.
type Identity struct {
	NodeID     string
	Epoch      uint64
	Transports []string
}

// Hello is what a caller says of itself and of what it wants.
type Hello struct {
	versionMin, versionMax uint16
	Kind, Lane             uint16
	Channel                [16]byte
	nonce                  [32]byte
	From                   Identity
}

func (h *Hello) marshal() []byte {
	le := binary.LittleEndian
	b := make([]byte, 0, helloSize)
	b = append(b, helloMagic[:]...)
	for _, v := range [...]uint16{h.versionMin, h.versionMax, h.Kind, h.Lane} {
		b = le.AppendUint16(b, v)
	}
	b = append(b, h.Channel[:]...)
	b = append(b, h.nonce[:]...)
	b = AppendPadded(b, h.From.NodeID, ticket.IDMax+1)
	b = le.AppendUint64(b, h.From.Epoch)
	return AppendPadded(b, strings.Join(h.From.Transports, ","), TransportsField)
}

func parseHello(b []byte) (*Hello, error) {
	le := binary.LittleEndian
	if len(b) != helloSize || [8]byte(b[:8]) != helloMagic {
		return nil, fmt.Errorf("%w: not a headrace daemon", ErrProtocol)
	}
	h := &Hello{versionMin: le.Uint16(b[8:]), versionMax: le.Uint16(b[10:]), Kind: le.Uint16(b[12:]), Lane: le.Uint16(b[14:])}
	copy(h.Channel[:], b[16:])
	copy(h.nonce[:], b[32:])
	isLane := h.Kind == KindLane || h.Kind == KindSpare
	if h.Kind < KindControl || h.Kind > KindRecall || !isLane && h.Lane != 0 || h.versionMin > h.versionMax {
		return nil, fmt.Errorf("%w: hello of kind %d, lane %d, versions %d to %d", ErrProtocol, h.Kind, h.Lane, h.versionMin, h.versionMax)
	}
	var err error
	h.From, err = parseIdentity(b[64:128], b[128:136], b[136:200])
	return h, err
}

func parseIdentity(node, epoch, transports []byte) (id Identity, err error) {
	if id.NodeID, err = ParsePadded(node); err != nil {
		return id, err
	}
	if id.NodeID == "" {
		return id, fmt.Errorf("%w: peer without a node id", ErrProtocol)
	}
	id.Epoch = binary.LittleEndian.Uint64(epoch)
	names, err := ParsePadded(transports)
	if names != "" {
		id.Transports = strings.Split(names, ",")
	}
	return id, err
}

type challenge struct {
	version, status uint16
	low, high       uint16 // with statusNoVersion: what the sender speaks
	nonce           [32]byte
	From            Identity
}

// marshal gives the challenge with its authentication code over the hello and itself.
func (c *challenge) marshal(key, helloBytes []byte) []byte {
	le := binary.LittleEndian
	b := make([]byte, 0, challengeSize)
	b = append(b, helloMagic[:]...)
	b = le.AppendUint16(b, c.version)
	b = le.AppendUint16(b, c.status)
	b = le.AppendUint16(b, c.low)
	b = le.AppendUint16(b, c.high)
	b = append(b, c.nonce[:]...)
	b = AppendPadded(b, c.From.NodeID, ticket.IDMax+1)
	b = le.AppendUint64(b, c.From.Epoch)
	b = AppendPadded(b, strings.Join(c.From.Transports, ","), TransportsField)
	return append(b, prove(key, labelAccept, helloBytes, b)...)
}

func parseChallenge(key, helloBytes, b []byte) (*challenge, error) {
	le := binary.LittleEndian
	if len(b) != challengeSize || [8]byte(b[:8]) != helloMagic || le.Uint16(b[10:]) != statusNoVersion && le.Uint32(b[12:]) != 0 {
		return nil, fmt.Errorf("%w: not a headrace daemon", ErrProtocol)
	}
	if !hmac.Equal(prove(key, labelAccept, helloBytes, b[:184]), b[184:]) {
		return nil, fmt.Errorf("%w: %w", ErrHandshake, ErrKey)
	}
	c := &challenge{version: le.Uint16(b[8:]), status: le.Uint16(b[10:]), low: le.Uint16(b[12:]), high: le.Uint16(b[14:])}
	copy(c.nonce[:], b[16:])
	var err error
	c.From, err = parseIdentity(b[48:112], b[112:120], b[120:184])
	return c, err
}

func prove(key []byte, label string, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(label))
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)
}

// Dial proves this end's key and checks the other's. The connection must have a deadline.
func Dial(c net.Conn, key []byte, self Identity, kind, lane uint16, channel [16]byte) (Identity, error) {
	h := Hello{versionMin: versionMin, versionMax: versionMax, Kind: kind, Lane: lane, Channel: channel, From: self}
	rand.Read(h.nonce[:])
	said := h.marshal()
	if _, err := c.Write(said); err != nil {
		return Identity{}, fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	answer := make([]byte, challengeSize)
	if _, err := io.ReadFull(c, answer); err != nil {
		return Identity{}, fmt.Errorf("%w: read challenge: %w", ErrHandshake, err)
	}
	ch, err := parseChallenge(key, said, answer)
	if err != nil {
		return Identity{}, err
	}
	if ch.status == statusNoVersion || ch.status == StatusOK && (ch.version < versionMin || ch.version > versionMax) {
		return Identity{}, skew(ch.From.NodeID, ch.low, ch.high)
	}
	if ch.status != StatusOK {
		return Identity{}, refusal(ch.status)
	}
	if _, err := c.Write(prove(key, labelDial, said, answer)); err != nil {
		return Identity{}, fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	ready := make([]byte, readySize)
	if _, err := io.ReadFull(c, ready); err != nil {
		return Identity{}, fmt.Errorf("%w: read ready: %w", ErrHandshake, err)
	}
	if s := binary.LittleEndian.Uint16(ready); s != StatusOK {
		return Identity{}, refusal(s)
	}
	return ch.From, nil
}

func refusal(status uint16) error {
	if status == StatusNotExpected {
		return fmt.Errorf("%w: refused: %s; %w", ErrHandshake, statusWords[status], ErrSuccessor)
	}
	if status == statusWrongProof {
		return fmt.Errorf("%w: refused: %w", ErrHandshake, ErrKey)
	}
	if w := statusWords[status]; w != "" {
		return fmt.Errorf("%w: refused: %s", ErrHandshake, w)
	}
	return fmt.Errorf("%w: refused with status %d", ErrHandshake, status)
}

// Accept reads who dials and checks its proof. admit is asked when the proof was right: it answers a status.
// Nothing of a caller without the key reaches more than this function.
func Accept(c net.Conn, key []byte, self Identity, full bool, admit func(*Hello) uint16) (*Hello, error) {
	said := make([]byte, helloSize)
	if _, err := io.ReadFull(c, said); err != nil {
		return nil, fmt.Errorf("%w: read hello: %w", ErrHandshake, err)
	}
	h, err := parseHello(said)
	if err != nil {
		return nil, err
	}
	ch := challenge{version: min(h.versionMax, versionMax), From: self}
	switch {
	case h.versionMin > versionMax || h.versionMax < versionMin:
		ch.version, ch.status, ch.low, ch.high = 0, statusNoVersion, versionMin, versionMax
	case full:
		ch.status = StatusFull
	}
	rand.Read(ch.nonce[:])
	answer := ch.marshal(key, said)
	if _, err := c.Write(answer); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	if ch.status == statusNoVersion {
		return nil, skew(h.From.NodeID, h.versionMin, h.versionMax)
	}
	if ch.status != StatusOK {
		return nil, fmt.Errorf("%w: %s", ErrHandshake, statusWords[ch.status])
	}
	proof := make([]byte, proofSize)
	if _, err := io.ReadFull(c, proof); err != nil {
		return nil, fmt.Errorf("%w: read proof: %w", ErrHandshake, err)
	}
	status := uint16(statusWrongProof)
	if hmac.Equal(proof, prove(key, labelDial, said, answer)) {
		status = admit(h)
	}
	var ready [readySize]byte
	binary.LittleEndian.PutUint16(ready[:], status)
	if _, err := c.Write(ready[:]); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	if status != StatusOK {
		return nil, fmt.Errorf("%w: refused the caller with status %d (%s)", ErrHandshake, status, statusWords[status])
	}
	return h, nil
}

// AppendPadded appends a length byte, s and zeros up to width bytes. s must be shorter than width.
func AppendPadded(b []byte, s string, width int) []byte {
	if len(s) >= width {
		panic("handshake: string exceeds its field: a limit was not checked")
	}
	b = append(b, byte(len(s)))
	b = append(b, s...)
	return append(b, make([]byte, width-1-len(s))...)
}

// ParsePadded reads such a field. What it gives is safe to log.
func ParsePadded(b []byte) (string, error) {
	n := int(b[0])
	if n >= len(b) {
		return "", fmt.Errorf("%w: string of %d bytes in a field of %d", ErrProtocol, n, len(b))
	}
	for _, c := range b[1+n:] {
		if c != 0 {
			return "", fmt.Errorf("%w: bytes after the end of a string", ErrProtocol)
		}
	}
	s := string(b[1 : 1+n])
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f || r == utf8.RuneError }) {
		return "", fmt.Errorf("%w: string with control characters", ErrProtocol)
	}
	return s, nil
}
