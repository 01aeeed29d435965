package router

import (
	"cmp"
	"encoding/hex"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/dialects"
	"github.com/headrace/headrace/router/pairing"
)

const (
	// movesUsual is how many streams move at once from one worker, and to one, where nothing else is said: they share the channel, and
	// what waits for it goes on making tokens.
	movesUsual = 4
	// moveTries is how often a stream is tried to be moved from one worker.
	moveTries = 3
	// muteMax is how many workers are remembered that do not know how to move a stream.
	muteMax = 1024
)

// What became of streams of workers that drain, beside the dialects' words.
const (
	moveNotWorth = "not_worth" // nobody to go to, or it ends sooner than it is moved
	moveGivenUp  = "given_up"  // it was tried often enough
)

// process is one life of a worker.
type process struct{ id, addr, incarnation string }

func processOf(w *pairing.Worker) process { return process{w.ID, w.Addr, w.Incarnation} }

// moves bounds how many streams are on their way, and counts them. Safe for concurrent use.
type moves struct {
	max     int // from one worker, and to one; 0: none moves
	results *prometheus.CounterVec
	pause   prometheus.Histogram

	mu    sync.Mutex // guards what follows
	from  map[string]int
	to    map[string]int
	mute  map[process]bool // who does not know how
	freed chan struct{}    // closed when one is over
}

func newMoves(limit int, reg *prometheus.Registry) *moves {
	m := &moves{max: limit, from: map[string]int{}, to: map[string]int{}, mute: map[process]bool{}, freed: make(chan struct{}),
		results: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "headrace", Subsystem: "router", Name: "moves_total",
			Help: "Streams of workers that drain, by what came of it: moved (another worker goes on, with the KV cache), refused (one of the two could not begin), failed (it came to nothing and the stream stays), " +
				"outlived (the stream ended before), not_offered (the worker does not know how), not_worth (there is nobody to go to, or it ends sooner), given_up (tried often enough)."}, []string{"result"}),
		pause: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "headrace", Subsystem: "router", Name: "move_pause_seconds",
			Help: "From a moving stream's hand-off until the other worker had it.", Buckets: prometheus.ExponentialBuckets(0.001, 2, 14)}),
	}
	for _, r := range []string{string(dialects.MoveDone), string(dialects.MoveRefused), string(dialects.MoveFailed), string(dialects.MoveOutlived), string(dialects.MoveNotOffered), moveNotWorth, moveGivenUp} {
		m.results.WithLabelValues(r)
	}
	reg.MustRegister(m.results, m.pause)
	return m
}

// taken says why no more streams may go to a worker now; "" if they may.
func (m *moves) taken(w *pairing.Worker) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.to[w.ID] >= m.max {
		return "as many as may be are on their way to " + w.ID
	}
	return ""
}

// leaves tells whether one more stream may leave a worker now; where it may not, again is closed when that may have changed.
func (m *moves) leaves(w *pairing.Worker) (ok bool, again <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.from[w.ID] < m.max, m.freed
}

// begin takes a place at both ends; false when another stream was faster.
func (m *moves) begin(from, to *pairing.Worker) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.from[from.ID] >= m.max || m.to[to.ID] >= m.max {
		return false
	}
	m.from[from.ID]++
	m.to[to.ID]++
	return true
}

// end gives the places back.
func (m *moves) end(x *dialects.Moved) {
	m.results.WithLabelValues(string(x.Result)).Inc()
	if x.Result == dialects.MoveDone {
		m.pause.Observe(seconds(x.Pause))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range []struct {
		n map[string]int
		w string
	}{{m.from, x.From.ID}, {m.to, x.To.ID}} {
		if e.n[e.w]--; e.n[e.w] <= 0 {
			delete(e.n, e.w)
		}
	}
	if x.Result == dialects.MoveNotOffered {
		if len(m.mute) >= muteMax {
			clear(m.mute) // they are asked once more
		}
		m.mute[processOf(x.From)] = true
	}
	close(m.freed)
	m.freed = make(chan struct{})
}

func (m *moves) isMute(w *pairing.Worker) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mute[processOf(w)]
}

// leaving is what a request knows of the worker that its stream is to leave.
type leaving struct {
	from   string // its id
	tries  int
	failed []string // who could not take it
	told   string   // what was counted of it
}

// Heir tells where the request's stream goes on.
func (q *request) Heir(from *pairing.Worker) (*pairing.Worker, <-chan struct{}) {
	f, m := q.r.fleet, q.r.moves
	changed := *f.changed.Load()
	if !f.drains(from) {
		return nil, changed
	}
	if q.leaving.from != from.ID {
		q.leaving = leaving{from: from.ID}
	}
	if m.isMute(from) {
		return nil, changed
	}
	if q.leaving.tries >= moveTries {
		q.stays(moveGivenUp, from, "it was tried "+strconv.Itoa(moveTries)+" times")
		return nil, changed
	}
	ok, freed := m.leaves(from)
	if !ok {
		return nil, freed
	}
	v := f.view()
	defer f.viewed(v)
	preq := pairing.Request{ID: q.id + strconv.Itoa(q.dreq.Choice), Model: q.body.Model, PromptTokens: q.promptTokens(), Exclude: q.leaving.failed}
	to, why, busy := pairing.Heir(preq, pairing.Leaving{From: from, Left: q.tokensLeft(), Taken: m.taken}, v)
	switch {
	case to == nil && busy:
		return nil, freed
	case to == nil:
		q.stays(moveNotWorth, from, why)
		return nil, changed
	case !m.begin(from, to):
		return nil, freed
	}
	q.leaving.tries++
	q.leaving.told = ""
	f.entrust(q.charge, to)
	q.r.log.Info("stream begins to move", "id", q.id, "request_id", q.dreq.RequestID, "choice", q.dreq.Choice, "from", from.ID, "to", to.ID, "tokens", q.given(), "why", why)
	return to, changed
}

// stays counts a stream that does not move, once for each cause.
func (q *request) stays(result string, from *pairing.Worker, why string) {
	if q.leaving.told == result {
		return
	}
	q.leaving.told = result
	q.r.moves.results.WithLabelValues(result).Inc()
	q.r.log.Info("stream does not move", "id", q.id, "request_id", q.dreq.RequestID, "choice", q.dreq.Choice, "from", from.ID, "why", why)
}

// Moved takes what came of a move.
func (q *request) Moved(x dialects.Moved) {
	now := time.Now()
	done := x.Result == dialects.MoveDone
	if done {
		q.charge.passOn()
		q.inherited(x.To)
	} else {
		q.charge.keep()
		q.leaving.failed = append(q.leaving.failed, x.To.ID)
	}
	q.r.moves.end(&x)
	rec := moveRecord{Time: x.Began, BeganMS: millis(x.Began.Sub(q.start)), From: x.From.ID, To: x.To.ID, Result: string(x.Result), Tokens: x.Tokens, PauseMS: millis(x.Pause), Milliseconds: millis(now.Sub(x.Began)), Ticket: hex.EncodeToString(x.Ticket[:])}
	level := q.r.log.Info
	if x.Err != nil {
		rec.Failure = x.Err.Error()
		level = q.r.log.Warn
	}
	q.r.decisions.moved(q.decided, rec)
	q.times.moved(rec)
	level("stream has moved, or not", "id", q.id, "request_id", q.dreq.RequestID, "choice", q.dreq.Choice, "from", x.From.ID, "to", x.To.ID, "result", rec.Result, "tokens", q.given(),
		"pause_ms", rec.PauseMS, "ms", rec.Milliseconds, "err", x.Err)
}

// inherited makes a worker the one that decodes for the request.
func (q *request) inherited(to *pairing.Worker) {
	if q.decision.Whole != nil {
		q.decision.Whole = to
	} else {
		q.decision.Decode = to
	}
	if q.prompt != nil {
		q.prompt.routed(pairing.Decision{Decode: to}, q.body.Model)
	}
	if q.session != 0 {
		q.r.sessions.stay(q.session, idsOf(q.decision), time.Now())
	}
}

// tokensLeft is how long the answer may still become, 0 where nobody says.
func (q *request) tokensLeft() int64 {
	v := q.body.Value("max_tokens")
	if q.endpoint == openai.Chat {
		if n := q.body.Value("max_completion_tokens"); n != nil {
			v = n
		}
	}
	n, err := strconv.ParseInt(string(v), 10, 64)
	if err != nil {
		if q.endpoint == openai.Chat {
			return 0
		}
		n = openai.DefaultCompletionTokens
	}
	return max(n-int64(len(q.progress.Given)), 1)
}

// drains tells whether a worker is one that routers give nothing more.
func (f *fleet) drains(w *pairing.Worker) bool {
	m := (*f.members.Load())[w.ID]
	return m != nil && sameProcess(m.w, w) && m.w.Weight != nil && *m.w.Weight == 0
}

// moveRecord is a move for people to read, as decisions and requests have it.
type moveRecord struct {
	Time         time.Time `json:"time"`
	BeganMS      float64   `json:"began_ms"` // since the request's arrival
	From         string    `json:"from"`
	To           string    `json:"to"`
	Result       string    `json:"result"`
	Failure      string    `json:"failure,omitempty"`
	Tokens       int       `json:"tokens"` // of the answer, when it began
	PauseMS      float64   `json:"pause_ms,omitempty"`
	Milliseconds float64   `json:"ms"`
	Ticket       string    `json:"ticket"` // the nonce, in hex
}

// moved notes a move of a decision's stream.
func (r *decisionRing) moved(n int, m moveRecord) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next-n <= decisionsKept {
		rec := &r.ring[n%decisionsKept]
		rec.Moves = append(slices.Clip(rec.Moves), m) // copies of it are in other hands
	}
}

// limitOfMoves is what a configuration says, 0 for none.
func limitOfMoves(n int) int { return max(cmp.Or(n, movesUsual), 0) }

var errMoves = errors.New("configure router: moves is below -1")
