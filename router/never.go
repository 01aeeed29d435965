package router

import (
	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/dialects"
)

// never is the answer to a request that no worker of its model could serve at any time: none serves alone, and those that share requests
// do not share this one. nil where one could, whatever keeps it from it now. It is asked when nobody was found.
func (q *request) never() *openai.Error {
	if q.dispatches > 0 {
		return nil
	}
	why, of := "", ""
	for _, m := range *q.r.fleet.order.Load() {
		if !m.w.Serves(q.body.Model) || q.refuse(m.w) != "" {
			continue
		}
		not := dialects.Unpaired(m.w.Dialect, q.dreq.Body)
		if m.w.Alone() || not == "" {
			return nil
		}
		why, of = not, m.w.Dialect
	}
	if why == "" {
		return nil
	}
	param := ""
	if q.body.N > 1 {
		param = "n"
	}
	return openai.Unsupported(param, "The workers of model %q (%s) serve requests in pairs alone, and no pair shares one with %s.", q.body.Model, of, why)
}
