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
	// Choice is which of the request's n answers this leg is for: a leg serves one.
	Choice int
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
	if k.Choice != 0 {
		dst = append(dst, `,"choice":`...)
		dst = strconv.AppendInt(dst, int64(k.Choice), 10)
	}
	return append(dst, '}')
}

func parseKV(v []byte) (*KVParams, error) {
	kv := &KVParams{}
	dialect := ""
	err := parseObject(v, func(key string, v []byte) (err error) {
		switch key {
		case "dialect":
			dialect, err = unquote(v)
		case "role":
			kv.Role, err = unquote(v)
		case "id":
			kv.ID, err = unquote(v)
		case "created":
			kv.Created, err = parseInt(v)
		case "seed":
			kv.Seed, err = parseSeed(v)
		case "ticket":
			kv.Ticket, err = parseTicket(v)
		case "peer":
			kv.Peer, err = unquote(v)
		case "deadline_ms":
			kv.DeadlineMS, err = parseInt(v)
		case "resume":
			kv.Resume, err = parseTokens(v, PromptTokensMax)
		case "choice":
			kv.Choice, err = parseChoice(v)
		}
		return err
	})
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

func parseChoice(v []byte) (int, error) {
	n, err := parseInt(v)
	if err == nil && (n < 0 || n >= ChoicesMax) {
		err = fmt.Errorf("must be between 0 and %d", ChoicesMax-1)
	}
	return int(n), err
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
