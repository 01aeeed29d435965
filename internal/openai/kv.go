package openai

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Dialect names the native protocol between router and worker.
const Dialect = "headrace/1"

// Roles of a leg.
const (
	RoleWhole   = "whole"
	RolePrefill = "prefill"
	RoleDecode  = "decode"
)

const (
	idBytesMax     = 128
	ticketBytesMax = 1024
)

// KVParams is the field kv_transfer_params that a router adds to the client's body.
type KVParams struct {
	Role       string
	ID         string
	Created    int64
	Seed       uint64
	Ticket     []byte
	Peer       string // prefill only: host:port of the decode side's daemon
	DeadlineMS int64  // unix milliseconds; 0: none
	// Resume is what the client has been given already. nil on the first attempt; an empty list says that the role
	// chunk has been sent and no token yet.
	Resume []int32
}

// AppendJSON appends the field's value.
func (k *KVParams) AppendJSON(dst []byte) []byte {
	dst = append(dst, `{"dialect":"`+Dialect+`","role":`...)
	dst = AppendString(dst, k.Role)
	dst = append(dst, `,"id":`...)
	dst = AppendString(dst, k.ID)
	dst = append(dst, `,"created":`...)
	dst = strconv.AppendInt(dst, k.Created, 10)
	dst = append(dst, `,"seed":`...)
	dst = strconv.AppendUint(dst, k.Seed, 10)
	if len(k.Ticket) > 0 {
		dst = append(dst, `,"ticket":"`...)
		dst = base64.StdEncoding.AppendEncode(dst, k.Ticket)
		dst = append(dst, '"')
	}
	if k.Peer != "" {
		dst = append(dst, `,"peer":`...)
		dst = AppendString(dst, k.Peer)
	}
	if k.DeadlineMS != 0 {
		dst = append(dst, `,"deadline_ms":`...)
		dst = strconv.AppendInt(dst, k.DeadlineMS, 10)
	}
	if k.Resume != nil {
		dst = append(dst, `,"resume":`...)
		dst = appendInts(dst, k.Resume)
	}
	return append(dst, '}')
}

func parseKV(v []byte) (*KVParams, error) {
	kv := &KVParams{}
	dialect := ""
	err := walkObject(v, func(f field) (err error) {
		if isNull(f.value) {
			return nil
		}
		switch f.key {
		case "dialect":
			dialect, err = unquote(f.value)
		case "role":
			kv.Role, err = unquote(f.value)
		case "id":
			kv.ID, err = unquote(f.value)
		case "created":
			kv.Created, err = parseInt(f.value)
		case "seed":
			kv.Seed, err = parseSeed(f.value)
		case "ticket":
			kv.Ticket, err = parseTicket(f.value)
		case "peer":
			kv.Peer, err = unquote(f.value)
		case "deadline_ms":
			kv.DeadlineMS, err = parseInt(f.value)
		case "resume":
			kv.Resume, err = parseTokens(f.value, PromptTokensMax)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.key, err)
		}
		return nil
	})
	if errors.Is(err, errNotObject) {
		return nil, errors.New("must be an object")
	}
	if err != nil {
		return nil, err
	}
	return kv, kv.validate(dialect)
}

func (k *KVParams) validate(dialect string) error {
	if dialect != Dialect {
		return fmt.Errorf("the dialect is %q, this worker speaks %q", dialect, Dialect)
	}
	if k.ID == "" || len(k.ID) > idBytesMax || strings.ContainsFunc(k.ID, func(r rune) bool { return r < 0x21 || r > 0x7E }) {
		return fmt.Errorf("id must have 1 to %d printable characters", idBytesMax)
	}
	switch k.Role {
	case RoleWhole:
	case RolePrefill, RoleDecode:
		if len(k.Ticket) == 0 {
			return fmt.Errorf("role %s needs a ticket", k.Role)
		}
		if k.Role == RolePrefill && k.Peer == "" {
			return errors.New("role prefill needs a peer")
		}
	default:
		return fmt.Errorf("the role must be prefill, decode or whole, not %q", k.Role)
	}
	return nil
}

func parseTicket(v []byte) ([]byte, error) {
	s, err := unquote(v)
	if err != nil {
		return nil, err
	}
	b, err := base64.StdEncoding.DecodeString(s)
	if err != nil || len(b) > ticketBytesMax {
		return nil, fmt.Errorf("must be base64 of at most %d bytes", ticketBytesMax)
	}
	return b, nil
}
