// Package trace puts together what routers and node daemons remember of one request, and writes it as a timeline for people.
// It must not change anything, nor need a part to answer: one that does not has a row that says so.
package trace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/adminpage"
	"github.com/headrace/headrace/internal/clusterauth"
)

// Router is where a router can be asked.
type Router struct {
	ID    string `json:"id"`
	Admin string `json:"admin"` // host:port of its admin listener
}

// Request is an ended request as a router tells of it. Times are milliseconds since its arrival.
type Request struct {
	Time         time.Time `json:"time"` // of its arrival
	ID           string    `json:"id"`   // of the answer
	RequestID    string    `json:"request_id"`
	TraceID      string    `json:"trace_id,omitempty"`
	Endpoint     string    `json:"endpoint"`
	Model        string    `json:"model"`
	Key          string    `json:"key,omitempty"`
	Stream       bool      `json:"stream"`
	Choices      int       `json:"choices"`
	Code         int       `json:"code"`
	Outcome      string    `json:"outcome"`
	Cause        string    `json:"cause,omitempty"` // why it was cancelled
	Phase        string    `json:"phase,omitempty"` // in which it was cancelled
	Error        string    `json:"error,omitempty"`
	QueuedMS     float64   `json:"queued_ms"`
	FirstMS      float64   `json:"first_token_ms,omitempty"`
	LastMS       float64   `json:"last_token_ms,omitempty"`
	TotalMS      float64   `json:"total_ms"`
	PromptTokens *int      `json:"prompt_tokens,omitempty"` // as the engine says
	CachedTokens *int      `json:"cached_tokens,omitempty"`
	Tokens       int       `json:"completion_tokens"`
	Attempts     []Attempt `json:"attempts"`
}

// Attempt is one dispatch of a request.
type Attempt struct {
	Choice       int     `json:"choice,omitempty"`
	Dispatch     int     `json:"dispatch"`
	Dialect      string  `json:"dialect"`
	Prefill      string  `json:"prefill,omitempty"`
	Decode       string  `json:"decode,omitempty"`
	Whole        string  `json:"whole,omitempty"`
	Cached       int64   `json:"cached_tokens_expected,omitempty"`
	BeganMS      float64 `json:"began_ms"`
	ReservingMS  float64 `json:"reserving_ms,omitempty"`
	PrefillingMS float64 `json:"prefilling_ms,omitempty"`
	TransferMS   float64 `json:"transferring_ms,omitempty"` // prefill handed off
	DecodingMS   float64 `json:"decoding_ms,omitempty"`
	FirstMS      float64 `json:"first_token_ms,omitempty"`
	EndedMS      float64 `json:"ended_ms"`
	Result       string  `json:"result"`
	Reason       string  `json:"reason,omitempty"`
	// Ticket is the nonce of the ticket, in hex, by which node daemons know its leases.
	Ticket string `json:"ticket,omitempty"`
	// Moves are those of its stream to other workers.
	Moves []Move `json:"moves,omitempty"`
	// Places are the workers of the attempt, and the node daemons beside them.
	Places []Place `json:"places,omitempty"`
}

// Move is a stream's way from one worker to another that goes on with it.
type Move struct {
	From    string  `json:"from"`
	To      string  `json:"to"`
	BeganMS float64 `json:"began_ms"`
	TookMS  float64 `json:"took_ms"`
	PauseMS float64 `json:"pause_ms,omitempty"`
	Tokens  int     `json:"tokens"`
	Result  string  `json:"result"`
	Failure string  `json:"failure,omitempty"`
	Ticket  string  `json:"ticket,omitempty"`
}

// Place is a worker of an attempt and the daemon beside it.
type Place struct {
	Worker    string `json:"worker"`
	Role      string `json:"role"` // prefill, decode or whole
	Node      string `json:"node,omitempty"`
	NodeAdmin string `json:"node_admin,omitempty"` // where the daemon can be asked
}

// Decision is a pairing decision, of which only what a running request's row needs is read.
type Decision struct {
	Time     time.Time `json:"time"`
	Dispatch int       `json:"dispatch"`
	Prefill  string    `json:"prefill,omitempty"`
	Decode   string    `json:"decode,omitempty"`
	Whole    string    `json:"whole,omitempty"`
	Reason   string    `json:"reason"`
	Result   string    `json:"result"`
}

// Lease is what a daemon remembers of one end of a lease: see transfer.LeaseCourse.
type Lease struct {
	Ticket    string     `json:"ticket"`
	Side      string     `json:"side"`
	Engine    string     `json:"engine"`
	PeerNode  string     `json:"peer_node"`
	Transport string     `json:"transport,omitempty"`
	State     string     `json:"state"`
	Reason    string     `json:"reason,omitempty"`
	Tokens    uint32     `json:"tokens"`
	Presented time.Time  `json:"presented"`
	Bound     *time.Time `json:"bound,omitempty"`
	First     *time.Time `json:"first_piece,omitempty"`
	Last      *time.Time `json:"last_piece,omitempty"`
	Ended     *time.Time `json:"ended,omitempty"`
	Bytes     uint64     `json:"bytes"`
	Pieces    uint64     `json:"pieces"`
	Again     uint64     `json:"pieces_again"`
	Lanes     int        `json:"lanes"`
}

// Daemon is what a node daemon answered about a ticket. Error says why there is nothing.
type Daemon struct {
	Node   string  `json:"node"`
	Ticket string  `json:"ticket"`
	Leases []Lease `json:"leases"`
	Error  string  `json:"error,omitempty"`
}

// Trace is one request.
type Trace struct {
	Router  string   `json:"router"`
	Request *Request `json:"request,omitempty"` // nil while it is served
	// Decisions are those that the router still has.
	Decisions []Decision `json:"decisions"`
	Daemons   []Daemon   `json:"daemons"`
	Rows      []Row      `json:"timeline"`
}

// ErrUnknown is why an id is not found where every router answered.
var ErrUnknown = errors.New("no router remembers a request of this id: each keeps the 1,024 that ended last; the access log has more")

var client = &http.Client{Timeout: adminpage.Timeout, Transport: &clusterauth.Transport{Base: &http.Transport{DisableKeepAlives: true}}}

// Gather asks the routers for a request, by its id, its X-Request-Id or its trace id, and the daemons for its leases. Where an id was used
// more than once it is the latest. The error is ErrUnknown when nobody has it.
func Gather(ctx context.Context, routers []Router, id string) (*Trace, error) {
	type answer struct {
		Requests  []Request  `json:"requests"`
		Decisions []Decision `json:"decisions"`
	}
	answers := make([]answer, len(routers))
	errs := make([]error, len(routers))
	var wg sync.WaitGroup
	for i, r := range routers {
		wg.Go(func() {
			err := adminpage.Get(ctx, client, r.Admin, "/debug/requests/"+url.PathEscape(id), &answers[i])
			if err != nil && !adminpage.Missing(err) {
				errs[i] = fmt.Errorf("router %s: %w", r.ID, err)
			}
		})
	}
	wg.Wait()
	var t *Trace
	for i, a := range answers {
		switch {
		case len(a.Requests) > 0 && (t == nil || t.Request == nil || a.Requests[0].Time.After(t.Request.Time)):
			t = &Trace{Router: routers[i].ID, Request: &a.Requests[0], Decisions: a.Decisions}
		case t == nil && len(a.Decisions) > 0:
			t = &Trace{Router: routers[i].ID, Decisions: a.Decisions}
		}
	}
	if t == nil {
		if err := errors.Join(errs...); err != nil {
			return nil, fmt.Errorf("ask routers for %s: %w", id, err)
		}
		return nil, ErrUnknown
	}
	t.askDaemons(ctx)
	t.Rows = t.rows()
	return t, nil
}

// askDaemons asks for the leases of each attempt, once a daemon and ticket.
func (t *Trace) askDaemons(ctx context.Context) {
	t.Daemons = []Daemon{}
	if t.Request == nil {
		return
	}
	var admins []string
	for _, a := range t.Request.Attempts {
		if a.Ticket == "" {
			continue
		}
		for _, p := range a.Places {
			if p.Node == "" || slices.ContainsFunc(t.Daemons, func(d Daemon) bool { return d.Node == p.Node && d.Ticket == a.Ticket }) {
				continue
			}
			t.Daemons = append(t.Daemons, Daemon{Node: p.Node, Ticket: a.Ticket})
			admins = append(admins, p.NodeAdmin)
		}
	}
	var wg sync.WaitGroup
	for i := range t.Daemons {
		wg.Go(func() {
			d := &t.Daemons[i]
			var err error
			d.Leases, err = Leases(ctx, client, admins[i], d.Ticket)
			switch {
			case adminpage.Missing(err):
				d.Error = "remembers no lease of this ticket"
			case admins[i] == "":
				d.Error = "cannot be asked: the router knows no address of it"
			case err != nil:
				d.Error = "cannot be asked: " + err.Error()
			}
		})
	}
	wg.Wait()
}

// Leases asks a daemon what it remembers of a ticket, which is named by its nonce in hex.
func Leases(ctx context.Context, client *http.Client, admin, ticket string) (list []Lease, err error) {
	err = adminpage.Get(ctx, client, admin, "/debug/leases/"+ticket, &list)
	return list, err
}

// List asks the routers for the requests that ended last, or for the slowest of those they keep, n at most in all. Routers that do not
// answer are in the error; what the others said is returned beside it.
func List(ctx context.Context, routers []Router, n int, slowest bool) ([]Request, error) {
	path := fmt.Sprintf("/debug/requests?n=%d", n)
	if slowest {
		path += "&slowest=1"
	}
	lists := make([][]Request, len(routers))
	errs := make([]error, len(routers))
	var wg sync.WaitGroup
	for i, r := range routers {
		wg.Go(func() {
			if err := adminpage.Get(ctx, client, r.Admin, path, &lists[i]); err != nil {
				errs[i] = fmt.Errorf("router %s: %w", r.ID, err)
			}
		})
	}
	wg.Wait()
	all := slices.Concat(lists...)
	slices.SortStableFunc(all, func(a, b Request) int {
		if slowest {
			return cmp.Compare(b.TotalMS, a.TotalMS)
		}
		return b.Time.Compare(a.Time)
	})
	return all[:min(n, len(all))], errors.Join(errs...)
}
