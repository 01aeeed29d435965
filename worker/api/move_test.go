package api

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/headrace/headrace/internal/openai"
)

// movingEngine takes moves of one request.
type movingEngine struct {
	fakeEngine
	moves []Move
}

func (e *movingEngine) Move(_ context.Context, m Move) error {
	if m.ID != "chatcmpl-1" {
		return &NotMovedError{"no such request decodes here"}
	}
	e.moves = append(e.moves, m)
	return nil
}

// TestMoveRequest holds what the server makes of being told to move a stream.
func TestMoveRequest(t *testing.T) {
	e := &movingEngine{}
	h := start(t, &e.fakeEngine, func(c *Config) { c.Engine = e })
	p := openai.MoveParams{ID: "chatcmpl-1", Choice: 2, Ticket: []byte("ticket"), Peer: "10.0.0.1:7000", Tokens: 17}
	if status, body := h.post(openai.PathMove, string(p.AppendJSON(nil))); status != http.StatusAccepted {
		t.Errorf("%d %s", status, body)
	}
	if len(e.moves) != 1 || e.moves[0].ID != p.ID || e.moves[0].Choice != 2 || string(e.moves[0].Ticket) != "ticket" || e.moves[0].Peer != p.Peer || e.moves[0].Tokens != 17 {
		t.Errorf("the engine was told %+v", e.moves)
	}
	p.ID = "chatcmpl-2"
	if status, body := h.post(openai.PathMove, string(p.AppendJSON(nil))); status != http.StatusConflict || !strings.Contains(body, "no such request") {
		t.Errorf("%d %s", status, body)
	}
	for _, body := range []string{
		``, `[]`, `{`, `{"dialect":"headrace/2","id":"a","ticket":"dA==","peer":"p","tokens":1}`, `{"dialect":"headrace/1","id":"","ticket":"dA==","peer":"p","tokens":1}`,
		`{"dialect":"headrace/1","id":"a","ticket":"","peer":"p","tokens":1}`, `{"dialect":"headrace/1","id":"a","ticket":"dA==","peer":"p","tokens":0}`,
		`{"dialect":"headrace/1","id":"a","ticket":"dA==","peer":"p","tokens":1,"choice":-1}`,
	} {
		if status, said := h.post(openai.PathMove, body); status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", body, status, said)
		}
	}
	if status, _ := h.get(openai.PathMove); status != http.StatusMethodNotAllowed {
		t.Errorf("GET: %d", status)
	}
	if len(e.moves) != 1 {
		t.Errorf("the engine was told %+v", e.moves)
	}
}

// TestMoveIsNotOffered by an engine that does not know how.
func TestMoveIsNotOffered(t *testing.T) {
	h := start(t, &fakeEngine{}, nil)
	p := openai.MoveParams{ID: "a", Ticket: []byte("t"), Peer: "p", Tokens: 1}
	if status, body := h.post(openai.PathMove, string(p.AppendJSON(nil))); status != http.StatusNotFound {
		t.Errorf("%d %s", status, body)
	}
}

// TestMovingStream holds what the router hears of a stream that moves, and of one that stays after all.
func TestMovingStream(t *testing.T) {
	e := &fakeEngine{}
	e.play = func(_ context.Context, r *Request, send func(TokenEvent)) {
		if !r.Movable {
			t.Error("a router's request may not move")
		}
		send(TokenEvent{Token: 'h'})
		send(TokenEvent{Kind: EventHandoff})
		send(TokenEvent{Kind: EventStays, Reason: "nobody came"})
		send(TokenEvent{Token: 0xc3}) // half a character stays with the tokens
		send(TokenEvent{Kind: EventHandoff})
		send(TokenEvent{Kind: EventSettled})
	}
	h := start(t, e, nil)
	h.expect("/v1/chat/completions", native("whole", ""), "role", ": t 104", `text "h"`, ": handoff", ": stays nobody came", ": t 195", ": handoff", ": settled")
	e.play = func(_ context.Context, r *Request, send func(TokenEvent)) {
		if r.Movable {
			t.Error("a client's own request may move")
		}
		says("hi", openai.FinishLength)(t.Context(), r, send)
	}
	if status, body := h.post("/v1/completions", `{"model":"tiny","prompt":"x","max_tokens":2}`); status != http.StatusOK || !slices.Contains(strings.Split(body, `"`), "hi") {
		t.Errorf("%d %s", status, body)
	}
}
