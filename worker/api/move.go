package api

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/headrace/headrace/internal/openai"
)

// Move tells an engine to let a request go on elsewhere: it is to play the prefill side under a ticket, with the KV of the prompt
// and of the first Tokens tokens of the answer.
type Move struct {
	ID     string
	Choice int
	Ticket []byte
	Peer   string
	Tokens int
}

// Mover is an Engine whose requests can move while they run. Move returns when the move has begun; what comes of it is told among
// the request's events: EventHandoff and EventSettled, or EventStays, or its own end where that comes first.
type Mover interface {
	Move(ctx context.Context, m Move) error
}

// NotMovedError is a Mover's answer when it cannot begin.
type NotMovedError struct{ Reason string }

func (e *NotMovedError) Error() string { return "move a request: " + e.Reason }

// moveTimeout bounds the wait for the engine's loop to hear of a move.
const moveTimeout = 5 * time.Second

// move begins the move of a stream.
func (s *Server) move(w http.ResponseWriter, r *http.Request) {
	mover, ok := s.cfg.Engine.(Mover)
	if !ok {
		writeError(w, openai.NotFound(r.Method, r.URL.Path))
		return
	}
	body, e := s.readBody(w, r)
	if e != nil {
		writeError(w, e)
		return
	}
	m, e := openai.ParseMove(body)
	if e != nil {
		writeError(w, e)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), moveTimeout)
	defer cancel()
	if err := mover.Move(ctx, Move(*m)); err != nil {
		s.cfg.Logger.Info("a stream cannot move", "id", m.ID, "choice", m.Choice, "err", err)
		writeError(w, openai.Conflict("The stream stays here: %v.", err))
		return
	}
	writeJSON(w, http.StatusAccepted, fmt.Appendf(nil, `{"moving":%q}`, m.ID))
}
