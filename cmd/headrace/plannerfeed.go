package main

import (
	"context"
	"slices"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/routers"
	"github.com/headrace/headrace/internal/trace"
	"github.com/headrace/headrace/scheduler/operate"
	"github.com/headrace/headrace/scheduler/planner"
)

// feed tells a planner of single requests: those that ended since the last look, of the 1,024 that each router keeps. What is still being
// answered is not known, so that arrivals come late by as long as answers take.
type feed struct {
	model string
	seen  map[string]map[string]bool // ids of the last list, by router
	last  time.Duration              // arrivals are told in order: none before one that was told
}

// read adds what is new to a look; what was there before the first one is not.
func (f *feed) read(ctx context.Context, asker *routers.Asker, list []registry.Router, epoch time.Time, into *operate.Seen) error {
	if f.seen == nil {
		f.seen = map[string]map[string]bool{}
	}
	var fresh []trace.Request
	for _, r := range list {
		var ended []trace.Request
		if err := asker.Get(ctx, r, "/debug/requests?n=1024", &ended); err != nil {
			return err
		}
		before, ids := f.seen[r.ID], make(map[string]bool, len(ended))
		for i := range ended {
			x := &ended[i]
			ids[x.ID] = true
			if before != nil && !before[x.ID] && x.Model == f.model && x.Outcome == "ok" && x.PromptTokens != nil {
				fresh = append(fresh, *x)
			}
		}
		f.seen[r.ID] = ids
	}
	slices.SortFunc(fresh, func(a, b trace.Request) int { return a.Time.Compare(b.Time) })
	for i := range fresh {
		f.tell(&fresh[i], epoch, into)
	}
	return nil
}

func (f *feed) tell(x *trace.Request, epoch time.Time, into *operate.Seen) {
	ms := func(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }
	cached := 0
	if x.CachedTokens != nil {
		cached = *x.CachedTokens
	}
	f.last = max(f.last, x.Time.Sub(epoch))
	into.Arrived = append(into.Arrived, planner.Arrival{At: f.last, Prompt: *x.PromptTokens, Cached: cached})
	d := planner.Done{Prompt: *x.PromptTokens, Output: x.Tokens, Cached: cached, TTFT: ms(x.FirstMS), Lasted: ms(x.TotalMS)}
	if x.Tokens > 1 {
		d.ITL = ms(x.LastMS-x.FirstMS) / time.Duration(x.Tokens-1)
	}
	into.Done = append(into.Done, d)
}
