package openai

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
)

// PathMove is where a worker is told to let a stream of the native dialect go on at another one.
const PathMove = "/move_request"

// MoveParams is what it is told: which stream, and under which ticket its KV cache goes to whom.
type MoveParams struct {
	ID     string // of the response
	Choice int
	Ticket []byte
	Peer   string // host:port of the daemon beside the worker that goes on
	// Tokens is how many of the answer's tokens that worker was told of: with the prompt they are what is moved. Those behind
	// them come with the record.
	Tokens int
}

// AppendJSON appends the request's body.
func (m *MoveParams) AppendJSON(dst []byte) []byte {
	dst = append(dst, `{"dialect":"`+Dialect+`","id":`...)
	dst = AppendString(dst, m.ID)
	dst = append(dst, `,"choice":`...)
	dst = strconv.AppendInt(dst, int64(m.Choice), 10)
	dst = append(dst, `,"ticket":"`...)
	dst = base64.StdEncoding.AppendEncode(dst, m.Ticket)
	dst = append(dst, `","peer":`...)
	dst = AppendString(dst, m.Peer)
	dst = append(dst, `,"tokens":`...)
	dst = strconv.AppendInt(dst, int64(m.Tokens), 10)
	return append(dst, '}')
}

// ParseMove reads a body that AppendJSON made.
func ParseMove(body []byte) (*MoveParams, *Error) {
	m := &MoveParams{}
	dialect := ""
	err := checkJSON(body)
	if err == nil {
		err = parseObject(body, func(key string, v []byte) (err error) {
			var n int64
			switch key {
			case "dialect":
				dialect, err = unquote(v)
			case "id":
				m.ID, err = unquote(v)
			case "choice":
				m.Choice, err = parseChoice(v)
			case "ticket":
				m.Ticket, err = parseTicket(v)
			case "peer":
				m.Peer, err = unquote(v)
			case "tokens":
				n, err = parseInt(v)
				m.Tokens = int(n)
			}
			return err
		})
	}
	switch {
	case err != nil:
	case dialect != Dialect:
		err = fmt.Errorf("the dialect is %q, this worker speaks %q", dialect, Dialect)
	case m.ID == "" || len(m.ID) > idBytesMax || len(m.Ticket) == 0 || m.Peer == "":
		err = errors.New("it needs an id, a ticket and a peer")
	case m.Tokens < 1 || m.Tokens > PromptTokensMax:
		err = errors.New("tokens must be at least 1")
	}
	if err != nil {
		return nil, BadRequest("", CodeInvalidValue, "Could not read what is to be moved: %v.", err)
	}
	return m, nil
}
