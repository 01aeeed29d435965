package transfer

// The handshake that begins every connection, control or lane. Both ends prove that they hold the cluster key without
// sending it: each answers the other's nonce with an HMAC-SHA256 under the key over everything said so far. Byte order is
// little-endian. A name field is one length byte, then the bytes, then zeros.
//
// 1. The dialling end sends HELLO:
//
//	offset size field
//	     0    8 magic "HEADRACE"
//	     8    2 lowest protocol version it speaks
//	    10    2 highest
//	    12    2 kind: 1 control, 2 lane, 3 lane of the transport that carries on where the channel's own has no lane, 4 examination
//	    14    2 lane, 0 in control connections
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

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/headrace/headrace/transfer/ticket"
)

const (
	helloSize     = 200
	challengeSize = 216
	proofSize     = 32
	readySize     = 4

	kindControl = 1
	kindLane    = 2
	kindSpare   = 3
	kindExam    = 4

	statusOK          = 0
	statusNoVersion   = 1
	statusFull        = 2
	statusNotExpected = 3
	statusWrongProof  = 4

	labelAccept = "headrace 1 accept"
	labelDial   = "headrace 1 dial"

	transportsField = 64
)

// versions is a build's override of the versions it speaks, "LOW-HIGH", set by the linker: for tests of skew.
var versions string

// The versions of the protocol between daemons that this build speaks.
var versionMin, versionMax = spoken(versions, 2, 2)

func spoken(override string, low, high uint16) (uint16, uint16) {
	if n, err := fmt.Sscanf(override, "%d-%d", &low, &high); override != "" && (n != 2 || err != nil) {
		panic("transfer: versions must be LOW-HIGH")
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

// ErrHandshake says why two daemons could not agree to speak.
var ErrHandshake = errors.New("shake hands")

var statusWords = map[uint16]string{
	statusFull:        "the peer has too many connections",
	statusNotExpected: "the peer does not expect this connection", statusWrongProof: "the peer has another cluster key",
}

// identity is what a daemon says of itself.
type identity struct {
	nodeID     string
	epoch      uint64
	transports []string
}

type hello struct {
	versionMin, versionMax uint16
	kind, lane             uint16
	channel                [16]byte
	nonce                  [32]byte
	from                   identity
}

func (h *hello) marshal() []byte {
	le := binary.LittleEndian
	b := make([]byte, 0, helloSize)
	b = append(b, helloMagic[:]...)
	for _, v := range [...]uint16{h.versionMin, h.versionMax, h.kind, h.lane} {
		b = le.AppendUint16(b, v)
	}
	b = append(b, h.channel[:]...)
	b = append(b, h.nonce[:]...)
	b = appendPadded(b, h.from.nodeID, ticket.IDMax+1)
	b = le.AppendUint64(b, h.from.epoch)
	return appendPadded(b, strings.Join(h.from.transports, ","), transportsField)
}

func parseHello(b []byte) (*hello, error) {
	le := binary.LittleEndian
	if len(b) != helloSize || [8]byte(b[:8]) != helloMagic {
		return nil, fmt.Errorf("%w: not a headrace daemon", ErrProtocol)
	}
	h := &hello{versionMin: le.Uint16(b[8:]), versionMax: le.Uint16(b[10:]), kind: le.Uint16(b[12:]), lane: le.Uint16(b[14:])}
	copy(h.channel[:], b[16:])
	copy(h.nonce[:], b[32:])
	if h.kind < kindControl || h.kind > kindExam || (h.kind == kindControl || h.kind == kindExam) && h.lane != 0 || h.versionMin > h.versionMax {
		return nil, fmt.Errorf("%w: hello of kind %d, lane %d, versions %d to %d", ErrProtocol, h.kind, h.lane, h.versionMin, h.versionMax)
	}
	var err error
	h.from, err = parseIdentity(b[64:128], b[128:136], b[136:200])
	return h, err
}

func parseIdentity(node, epoch, transports []byte) (id identity, err error) {
	if id.nodeID, err = parsePadded(node); err != nil {
		return id, err
	}
	if id.nodeID == "" {
		return id, fmt.Errorf("%w: peer without a node id", ErrProtocol)
	}
	id.epoch = binary.LittleEndian.Uint64(epoch)
	names, err := parsePadded(transports)
	if names != "" {
		id.transports = strings.Split(names, ",")
	}
	return id, err
}

type challenge struct {
	version, status uint16
	low, high       uint16 // with statusNoVersion: what the sender speaks
	nonce           [32]byte
	from            identity
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
	b = appendPadded(b, c.from.nodeID, ticket.IDMax+1)
	b = le.AppendUint64(b, c.from.epoch)
	b = appendPadded(b, strings.Join(c.from.transports, ","), transportsField)
	return append(b, prove(key, labelAccept, helloBytes, b)...)
}

func parseChallenge(key, helloBytes, b []byte) (*challenge, error) {
	le := binary.LittleEndian
	if len(b) != challengeSize || [8]byte(b[:8]) != helloMagic || le.Uint16(b[10:]) != statusNoVersion && le.Uint32(b[12:]) != 0 {
		return nil, fmt.Errorf("%w: not a headrace daemon", ErrProtocol)
	}
	if !hmac.Equal(prove(key, labelAccept, helloBytes, b[:184]), b[184:]) {
		return nil, fmt.Errorf("%w: the peer has another cluster key", ErrHandshake)
	}
	c := &challenge{version: le.Uint16(b[8:]), status: le.Uint16(b[10:]), low: le.Uint16(b[12:]), high: le.Uint16(b[14:])}
	copy(c.nonce[:], b[16:])
	var err error
	c.from, err = parseIdentity(b[48:112], b[112:120], b[120:184])
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

// dialHandshake proves this end's key and checks the other's. The connection must have a deadline.
func dialHandshake(c net.Conn, key []byte, self identity, kind, lane uint16, channel [16]byte) (identity, error) {
	h := hello{versionMin: versionMin, versionMax: versionMax, kind: kind, lane: lane, channel: channel, from: self}
	rand.Read(h.nonce[:])
	said := h.marshal()
	if _, err := c.Write(said); err != nil {
		return identity{}, fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	answer := make([]byte, challengeSize)
	if _, err := io.ReadFull(c, answer); err != nil {
		return identity{}, fmt.Errorf("%w: read challenge: %w", ErrHandshake, err)
	}
	ch, err := parseChallenge(key, said, answer)
	if err != nil {
		return identity{}, err
	}
	if ch.status == statusNoVersion || ch.status == statusOK && (ch.version < versionMin || ch.version > versionMax) {
		return identity{}, skew(ch.from.nodeID, ch.low, ch.high)
	}
	if ch.status != statusOK {
		return identity{}, refusal(ch.status)
	}
	if _, err := c.Write(prove(key, labelDial, said, answer)); err != nil {
		return identity{}, fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	ready := make([]byte, readySize)
	if _, err := io.ReadFull(c, ready); err != nil {
		return identity{}, fmt.Errorf("%w: read ready: %w", ErrHandshake, err)
	}
	if s := binary.LittleEndian.Uint16(ready); s != statusOK {
		return identity{}, refusal(s)
	}
	return ch.from, nil
}

func refusal(status uint16) error {
	if status == statusNotExpected {
		return fmt.Errorf("%w: refused: %s; %w", ErrHandshake, statusWords[status], errSuccessor)
	}
	if w := statusWords[status]; w != "" {
		return fmt.Errorf("%w: refused: %s", ErrHandshake, w)
	}
	return fmt.Errorf("%w: refused with status %d", ErrHandshake, status)
}

// acceptHandshake reads who dials and checks its proof. admit is asked when the proof was right: it answers a status.
// Nothing of a caller without the key reaches more than this function.
func acceptHandshake(c net.Conn, key []byte, self identity, full bool, admit func(*hello) uint16) (*hello, error) {
	said := make([]byte, helloSize)
	if _, err := io.ReadFull(c, said); err != nil {
		return nil, fmt.Errorf("%w: read hello: %w", ErrHandshake, err)
	}
	h, err := parseHello(said)
	if err != nil {
		return nil, err
	}
	ch := challenge{version: min(h.versionMax, versionMax), from: self}
	switch {
	case h.versionMin > versionMax || h.versionMax < versionMin:
		ch.version, ch.status, ch.low, ch.high = 0, statusNoVersion, versionMin, versionMax
	case full:
		ch.status = statusFull
	}
	rand.Read(ch.nonce[:])
	answer := ch.marshal(key, said)
	if _, err := c.Write(answer); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	if ch.status == statusNoVersion {
		return nil, skew(h.from.nodeID, h.versionMin, h.versionMax)
	}
	if ch.status != statusOK {
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
	if status != statusOK {
		return nil, fmt.Errorf("%w: refused the caller with status %d (%s)", ErrHandshake, status, statusWords[status])
	}
	return h, nil
}

// withDeadline runs f while c has ctx's deadline, or timeout's if that is sooner, and lets ctx's end break f off.
func withDeadline(ctx context.Context, c net.Conn, timeout time.Duration, f func() error) error {
	deadline := time.Now().Add(timeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	c.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	err := f()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	return err
}
