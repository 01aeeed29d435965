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
func (p *Plain) Run(ctx context.Context, a *Attempt, s Sink) Outcome {
	r := a.relay()
	r.client, r.probes, r.sink = p.Client, p.Probes, s
	return r.serve(ctx, nil)
}
