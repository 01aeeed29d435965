package router

import (
	"net/http"
	"strconv"

	"github.com/headrace/headrace/internal/trace"
)

// requestsShown is how many requests /debug/requests lists where it is not asked for another number.
const requestsShown = 20

// listRequests answers with the requests that ended last, or the slowest of those kept: ?n=N, ?slowest=1.
func (r *Router) listRequests(w http.ResponseWriter, req *http.Request) {
	n := requestsShown
	if s := req.FormValue("n"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil || n < 1 || n > requestsKept {
			http.Error(w, "n must be a number from 1 to "+strconv.Itoa(requestsKept), http.StatusBadRequest)
			return
		}
	}
	if req.FormValue("slowest") != "" {
		writeJSON(w, r.recent.slowest(n))
		return
	}
	writeJSON(w, r.recent.list(n, func(*record) bool { return true }))
}

// RequestTrace is what the router knows of the requests of one id: clients may use theirs again.
type RequestTrace struct {
	Requests []trace.Request `json:"requests"` // that ended, the latest first
	// Decisions are those still kept, of a request that has not ended too.
	Decisions []decisionRecord `json:"decisions"`
}

// showRequest answers with what happened to the request of an id: the answer's or its X-Request-Id.
func (r *Router) showRequest(w http.ResponseWriter, req *http.Request) {
	id := req.PathValue("id")
	t := RequestTrace{
		Requests:  r.recent.list(requestsKept, func(x *record) bool { return x.id == id || x.requestID == id || x.traceID == id }),
		Decisions: r.decisions.list(id),
	}
	if len(t.Requests) == 0 && len(t.Decisions) == 0 {
		http.Error(w, "no request of this id is kept: the router remembers the "+strconv.Itoa(requestsKept)+" that ended last", http.StatusNotFound)
		return
	}
	admins := map[string]string{}
	if nodes, ok := r.cfg.Source.(NodeSource); ok {
		for _, n := range nodes.Nodes() {
			admins[n.ID] = n.Admin
		}
	}
	for i := range t.Requests {
		for j := range t.Requests[i].Attempts {
			for k := range t.Requests[i].Attempts[j].Places {
				p := &t.Requests[i].Attempts[j].Places[k]
				p.NodeAdmin = admins[p.Node]
			}
		}
	}
	writeJSON(w, t)
}
