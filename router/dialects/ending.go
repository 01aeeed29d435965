package dialects

import (
	"errors"
	"io"

	"github.com/headrace/headrace/router/upstream"
)

// course is how far a leg has come.
type course uint8

const (
	unsent   course = iota // it was not opened, or the worker could not be dialled: the worker knows nothing of it
	sent                   // the worker may know of it
	answered               // its header is here
	ended                  // its response is whole
)

// deed is what is done with a leg when its attempt is over.
type deed uint8

const (
	leave      deed = iota // there is nothing to do
	finish                 // it ends by itself, and its connection serves again
	hangUp                 // its connection is closed, which is how engines learn that a request is cancelled
	callOff                // and the engine is told in so many words besides
	linger                 // it is closed when the engine has got so far that closing it means something to the other one
	seeThrough             // prefill is let end, and decode made to take what it sent
)

// ending is what is done when an attempt is over.
type ending struct {
	prefill, answer deed
	recall          bool // the ticket is void
}

// tongue is what engines of a dialect need beyond the closing of their connections.
type tongue struct {
	// deaf: a connection that closes is noticed late or not at all, and a worker may wait for its peer meanwhile.
	deaf bool
	// ticketed: daemons hold blocks for a ticket until both engines have seen it, or somebody voids it.
	ticketed bool
	// leased: what prefill has computed it keeps for minutes, unless decode's scheduler has seen the request, and lets it go.
	leased bool
	// stored: what prefill has sent, decode keeps until it has served the request. What is missing it waits for.
	stored bool
}

// end decides what becomes of the legs. It is the whole of the router's side of cancelling and of failing, for all phases: an
// attempt that reserves is one without legs, one that prefills has sent them, one that transfers has an answer of prefill's,
// and one that decodes has begun. done tells that the client has the answer, begun that it has content.
func (t tongue) end(prefill, answer course, begun, done bool) ending {
	e := ending{prefill: t.drop(prefill), answer: t.drop(answer)}
	if t.leased && !begun && e.answer == hangUp {
		e.answer = linger
	}
	if t.stored && (e.prefill == hangUp || prefill == ended && answer == unsent) {
		e.prefill = seeThrough
	}
	if done {
		e.answer = finish
		if e.prefill == callOff { // it has handed its KV cache over, or decode would not have answered
			e.prefill = finish
		}
	}
	// An engine whose scheduler has not seen the request refuses and revokes nothing.
	e.recall = t.ticketed && !begun && (prefill != unsent || answer != unsent)
	return e
}

// drop is what becomes of a leg that is not wanted any more.
func (t tongue) drop(c course) deed {
	switch {
	case c == unsent || c == ended:
		return leave
	case t.deaf:
		return callOff
	}
	return hangUp
}

// course is how far l has come.
func (l *leg) course() course {
	switch {
	case l == nil || l.undialled:
		return unsent
	case l.whole:
		return ended
	case l.answered || l.Headed():
		return answered
	}
	return sent
}

// took notes what a batch says about the leg's course.
func (l *leg) took(b upstream.Batch) {
	l.answered = l.answered || b.Status != 0 || l.Headed()
	l.ended = b.Err != nil
	l.whole = l.whole || b.Err == io.EOF
	if b.Err == nil || b.Err == io.EOF {
		return
	}
	var e *upstream.Error
	l.undialled = l.undialled || errors.As(b.Err, &e) && e.Kind == upstream.KindRefused
}
