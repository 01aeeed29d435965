// Package ticket mints and checks tickets: the right, given by the router to both sides of one dispatch attempt, that
// one prefill engine may push one request's KV cache into blocks that one decode engine will bind.
//
// A ticket is a fixed-width, versioned, authenticated string of Size bytes. It says nothing about blocks, addresses or
// prompts, and this package knows nothing about sockets. Byte order is little-endian:
//
//	offset size field
//	     0    4 magic "HRTK"
//	     4    1 version, 1
//	     5    1 reserved, 0
//	     6    2 size of the whole ticket in bytes, 352
//	     8   16 nonce, fresh for each dispatch attempt
//	    24   32 fingerprint of the model both engines must have
//	    56    8 deadline, milliseconds since the Unix epoch, signed
//	    64   64 id of the prefill engine's node daemon: one length byte, then the bytes, then zeros
//	   128   64 id of the decode engine's node daemon, the same form
//	   192   64 id of the prefill engine, the same form
//	   256   64 id of the decode engine, the same form
//	   320   32 HMAC-SHA256 over bytes 0 to 319 under the cluster key
//	   352
//
// On HTTP a ticket is standard base64 with padding.
package ticket

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"
)

const (
	// Size is the length of an encoded ticket.
	Size = 352
	// IDMax is the longest node or engine id a ticket can hold.
	IDMax = 63

	version  = 1
	idField  = IDMax + 1
	macStart = Size - sha256.Size
)

var magic = [4]byte{'H', 'R', 'T', 'K'}

// What Verify and Decode answer. Each is wrapped with the particulars.
var (
	ErrBadMAC    = errors.New("check ticket: wrong authentication code (another cluster key, or altered on its way)")
	ErrExpired   = errors.New("check ticket: past its deadline")
	ErrMalformed = errors.New("decode ticket: malformed")
)

// Ticket is the right of one dispatch attempt: P may push this request's KV into blocks that D will bind.
type Ticket struct {
	Nonce            [16]byte  // fresh for each dispatch attempt
	PNode, DNode     string    // node daemon ids, 1 to IDMax bytes
	PEngine, DEngine string    // engine (worker) ids as they attach to their daemons, 1 to IDMax bytes
	Fingerprint      [32]byte  // the model both must have
	Deadline         time.Time // truncated to milliseconds
}

// NewNonce draws a nonce.
func NewNonce() [16]byte {
	var n [16]byte
	rand.Read(n[:]) // never fails: crypto/rand ends the process when the kernel has no randomness
	return n
}

// Validate says whether t can be encoded.
func (t Ticket) Validate() error {
	for _, f := range [...]struct{ name, id string }{
		{"prefill node", t.PNode}, {"decode node", t.DNode}, {"prefill engine", t.PEngine}, {"decode engine", t.DEngine},
	} {
		if err := validateID(f.id); err != nil {
			return fmt.Errorf("%s id: %w", f.name, err)
		}
	}
	if t.Nonce == ([16]byte{}) {
		return errors.New("nonce is zero: use NewNonce")
	}
	if t.Deadline.UnixMilli() <= 0 {
		return errors.New("deadline is not after 1970")
	}
	return nil
}

func validateID(id string) error {
	if id == "" || len(id) > IDMax {
		return fmt.Errorf("is %d bytes long, need 1 to %d", len(id), IDMax)
	}
	if !utf8.ValidString(id) {
		return errors.New("is not UTF-8")
	}
	for i := range len(id) {
		if id[i] < 0x20 || id[i] == 0x7f {
			return errors.New("holds a control character")
		}
	}
	return nil
}

// Mint encodes and authenticates t. A ticket that Validate refuses gives nil, which every reader refuses in turn.
func Mint(key []byte, t Ticket) []byte {
	if t.Validate() != nil {
		return nil
	}
	b := make([]byte, Size)
	copy(b, magic[:])
	b[4] = version
	binary.LittleEndian.PutUint16(b[6:], Size)
	copy(b[8:], t.Nonce[:])
	copy(b[24:], t.Fingerprint[:])
	binary.LittleEndian.PutUint64(b[56:], uint64(t.Deadline.UnixMilli()))
	for i, id := range [...]string{t.PNode, t.DNode, t.PEngine, t.DEngine} {
		f := b[64+i*idField:]
		f[0] = byte(len(id))
		copy(f[1:], id)
	}
	mac(key, b[:macStart], b[macStart:macStart])
	return b
}

// Verify decodes b and checks its authentication code and deadline. The code is checked before anything else is read.
func Verify(key, b []byte, now time.Time) (Ticket, error) {
	if len(b) != Size {
		return Ticket{}, fmt.Errorf("%w: %d bytes, want %d", ErrMalformed, len(b), Size)
	}
	var sum [sha256.Size]byte
	if !hmac.Equal(mac(key, b[:macStart], sum[:0]), b[macStart:]) {
		return Ticket{}, ErrBadMAC
	}
	t, err := Decode(b)
	if err != nil {
		return Ticket{}, err
	}
	if !now.Before(t.Deadline) {
		return Ticket{}, fmt.Errorf("%w, by %v", ErrExpired, now.Sub(t.Deadline).Round(time.Millisecond))
	}
	return t, nil
}

// Decode reads b without checking who made it: engines hold no key, and their daemons verify.
func Decode(b []byte) (Ticket, error) {
	var t Ticket
	if len(b) != Size {
		return t, fmt.Errorf("%w: %d bytes, want %d", ErrMalformed, len(b), Size)
	}
	if [4]byte(b) != magic {
		return t, fmt.Errorf("%w: no ticket magic", ErrMalformed)
	}
	if b[4] != version || b[5] != 0 || binary.LittleEndian.Uint16(b[6:]) != Size {
		return t, fmt.Errorf("%w: version %d, this build reads version %d", ErrMalformed, b[4], version)
	}
	copy(t.Nonce[:], b[8:])
	copy(t.Fingerprint[:], b[24:])
	t.Deadline = time.UnixMilli(int64(binary.LittleEndian.Uint64(b[56:])))
	for i, id := range [...]*string{&t.PNode, &t.DNode, &t.PEngine, &t.DEngine} {
		f := b[64+i*idField:][:idField]
		n := int(f[0])
		if n > IDMax {
			return Ticket{}, fmt.Errorf("%w: id of %d bytes", ErrMalformed, n)
		}
		for _, c := range f[1+n:] {
			if c != 0 {
				return Ticket{}, fmt.Errorf("%w: bytes after the end of an id", ErrMalformed)
			}
		}
		*id = string(f[1 : 1+n])
	}
	if err := t.Validate(); err != nil {
		return Ticket{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return t, nil
}

func mac(key, b, sum []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(b)
	return h.Sum(sum)
}
