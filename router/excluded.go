package router

import (
	"time"

	"github.com/headrace/headrace/router/pairing"
)

// againAfter is how long a worker that failed a request is left alone by it where nobody else is there to go on: what made it fail,
// a node daemon that starts anew say, has often passed by then.
const againAfter = time.Second

// excluded is a worker that failed a request.
type excluded struct {
	worker *pairing.Worker
	at     time.Time
}

// excluded gives the ids of the workers that the request does not go to: those that failed it and are still the processes they
// were (one that came back under its old id is another, of which nothing is known). Where nobody else is left it goes to all but those
// in again, a part of failed: who has a part of the answer would lose it otherwise. until is when again is shorter; zero: never.
func (q *request) excluded(now time.Time) (failed, again []string, until time.Time) {
	if len(q.exclude) == 0 {
		return nil, nil, time.Time{}
	}
	members := *q.r.fleet.members.Load()
	for _, x := range q.exclude {
		if m := members[x.worker.ID]; m != nil && !sameProcess(m.w, x.worker) {
			continue
		}
		failed = append(failed, x.worker.ID)
		if at := x.at.Add(againAfter); !q.sent {
			again = append(again, x.worker.ID)
		} else if at.After(now) {
			again = append(again, x.worker.ID)
			if until.IsZero() || at.Before(until) {
				until = at
			}
		}
	}
	return failed, again, until
}
