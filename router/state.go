package router

import "fmt"

// state is where a request is. The router owns it from its first byte to its last; only the goroutine that serves the
// request changes it.
type state uint8

const (
	stateQueued       state = iota // waiting for admission
	statePairing                   // choosing workers, or waiting for one to come back
	stateReserving                 // workers are chosen, and what they must be told of each other is asked for
	statePrefilling                // dispatched, no hand-off yet
	stateTransferring              // prefill handed off, decode has not begun
	stateDecoding
	stateDone      // answered, well or with an error
	stateCancelled // the client left, or the deadline passed
	stateCount
)

var stateNames = [stateCount]string{"queued", "pairing", "reserving", "prefilling", "transferring", "decoding", "done", "cancelled"}

func (s state) String() string { return stateNames[s] }

// nextStates has what may follow. Back to pairing means to be dispatched again.
var nextStates = [stateCount][]state{
	stateQueued:       {statePairing, stateDone, stateCancelled},
	statePairing:      {stateReserving, statePrefilling, stateDone, stateCancelled},
	stateReserving:    {statePrefilling, statePairing, stateDone, stateCancelled},
	statePrefilling:   {stateTransferring, stateDecoding, statePairing, stateDone, stateCancelled},
	stateTransferring: {stateDecoding, statePairing, stateDone, stateCancelled},
	stateDecoding:     {statePairing, stateDone, stateCancelled},
}

func (s state) terminal() bool { return s == stateDone || s == stateCancelled }

// mayBecome tells whether next can follow s.
func (s state) mayBecome(next state) bool {
	for _, n := range nextStates[s] {
		if n == next {
			return true
		}
	}
	return false
}

// enter moves the request on and the gauges with it. Entering the state it is in changes nothing.
func (q *request) enter(next state) {
	if next == q.state {
		return
	}
	if !q.state.mayBecome(next) {
		panic(fmt.Sprintf("request %s cannot go from %s to %s", q.id, q.state, next))
	}
	m := q.r.metrics
	m.phases[q.state].Dec()
	if !next.terminal() {
		m.phases[next].Inc()
	}
	q.state = next
	q.times.enter(q, next)
}
