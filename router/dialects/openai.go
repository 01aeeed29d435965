package dialects

import (
	"context"

	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/upstream"
)

// PlainName is the dialect of an OpenAI server that has no connector.
const PlainName = pairing.DialectPlain

// Plain hands requests on to a server that serves them whole.
type Plain struct {
	Client *upstream.Client
	Probes *Prober
}

var _ Dialect = (*Plain)(nil)

// Name is "openai".
func (*Plain) Name() string { return PlainName }

// Run serves the request by one worker.
func (p *Plain) Run(ctx context.Context, a *Attempt, s Sink) (out Outcome) {
	r := &relay{Attempt: a, client: p.Client, probes: p.Probes, sink: s}
	r.whole()
	defer func() { r.close(out.Result == Finished) }()
	return r.run(ctx)
}

// whole sends the client's own request to the one worker.
func (r *relay) whole() {
	body := r.Request.Body.Whole()
	if r.Request.Path == PathGenerate {
		body = r.Request.Body.Without(notGenerates, nil)
	}
	r.answer = r.open(r.Decision.Whole, roleWhole, body)
}
