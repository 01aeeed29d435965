package trace

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"
)

// Row is a span of the timeline, in milliseconds since the request arrived at its router. Those of daemons go by the daemons'
// clocks.
type Row struct {
	Who    string  `json:"who"`
	What   string  `json:"what"`
	FromMS float64 `json:"from_ms"`
	ToMS   float64 `json:"to_ms"`
	Note   string  `json:"note,omitempty"`
	// Error says why there is no span.
	Error string `json:"error,omitempty"`
}

// rows puts everything into the order in which it is read: the router's spans, and below each attempt those of its daemons.
func (t *Trace) rows() []Row {
	q := t.Request
	if q == nil {
		return t.running()
	}
	out := []Row{{Who: t.Router, What: "queued", ToMS: q.QueuedMS}}
	for i := range q.Attempts {
		a := &q.Attempts[i]
		out = append(out, a.rows()...)
		for j := range t.Daemons {
			if d := &t.Daemons[j]; a.Ticket != "" && d.Ticket == a.Ticket {
				out = append(out, d.rows(q.Time)...)
			}
		}
	}
	if q.FirstMS > 0 {
		out = append(out, Row{Who: "client", What: "tokens", FromMS: q.FirstMS, ToMS: q.LastMS, Note: fmt.Sprintf("%d", q.Tokens)})
	}
	return append(out, Row{Who: t.Router, What: "request", ToMS: q.TotalMS, Note: q.Outcome})
}

// running is what can be told of a request that has not ended: the latest decisions come first.
func (t *Trace) running() []Row {
	var out []Row
	for i := len(t.Decisions) - 1; i >= 0; i-- {
		d := &t.Decisions[i]
		from := float64(d.Time.Sub(t.Decisions[len(t.Decisions)-1].Time).Microseconds()) / 1000
		out = append(out, Row{Who: who(d.Prefill, d.Decode, d.Whole), What: fmt.Sprintf("attempt %d", d.Dispatch), FromMS: from, ToMS: from, Note: d.Result + "; " + d.Reason})
	}
	return out
}

func who(prefill, decode, whole string) string {
	if whole != "" {
		return whole
	}
	return prefill + " + " + decode
}

// rows are an attempt's, from phase to phase.
func (a *Attempt) rows() []Row {
	name := fmt.Sprintf("attempt %d", a.Dispatch)
	if a.Choice > 0 {
		name += fmt.Sprintf(" of choice %d", a.Choice)
	}
	note := a.Dialect + ", " + a.Result
	if a.Reason != "" {
		note += ": " + a.Reason
	}
	out := []Row{{Who: who(a.Prefill, a.Decode, a.Whole), What: name, FromMS: a.BeganMS, ToMS: a.EndedMS, Note: note}}
	first, last := a.Prefill, a.Decode
	if a.Whole != "" {
		first, last = a.Whole, a.Whole
	}
	phases := []struct {
		who, what string
		at        float64
	}{
		{first, "  reserve", a.ReservingMS}, {first, "  prefill", a.PrefillingMS},
		{first + " -> " + last, "  transfer", a.TransferMS}, {last, "  decode", a.DecodingMS},
	}
	for i, p := range phases {
		if p.at == 0 {
			continue
		}
		to := a.EndedMS
		for _, next := range phases[i+1:] {
			if next.at > 0 {
				to = next.at
				break
			}
		}
		out = append(out, Row{Who: p.who, What: p.what, FromMS: p.at, ToMS: to})
	}
	for _, m := range a.Moves {
		note := fmt.Sprintf("%s behind %d tokens", m.Result, m.Tokens)
		if m.Failure != "" {
			note += ": " + m.Failure
		}
		out = append(out, Row{Who: m.From + " -> " + m.To, What: "  move", FromMS: m.BeganMS, ToMS: m.BeganMS + m.TookMS, Note: note})
	}
	return out
}

// rows are a daemon's, whose clock may be another.
func (d *Daemon) rows(start time.Time) []Row {
	if d.Error != "" {
		return []Row{{Who: d.Node, What: "  lease", Error: d.Error}}
	}
	at := func(t *time.Time) float64 { return float64(t.Sub(start).Microseconds()) / 1000 }
	var out []Row
	for i := range d.Leases {
		l := &d.Leases[i]
		end := l.Ended
		note := l.State
		if l.Reason != "" {
			note += ": " + l.Reason
		}
		if end == nil {
			end = &l.Presented
			note += ", lives"
		}
		out = append(out, Row{Who: d.Node, What: "  lease, " + l.Side, FromMS: at(&l.Presented), ToMS: at(end), Note: note})
		if l.Bound != nil {
			out = append(out, Row{Who: d.Node, What: "    unbound", FromMS: at(&l.Presented), ToMS: at(l.Bound), Note: fmt.Sprintf("%d tokens", l.Tokens)})
		}
		if l.First != nil {
			note := fmt.Sprintf("%d bytes in %d pieces over %d lanes of %s", l.Bytes, l.Pieces, l.Lanes, l.Transport)
			if l.Again > 0 {
				note += fmt.Sprintf(", %d sent again", l.Again)
			}
			out = append(out, Row{Who: d.Node, What: "    pieces", FromMS: at(l.First), ToMS: at(l.Last), Note: note})
		}
	}
	return out
}

// barWidth is that of the timeline's bars.
const barWidth = 40

// bar draws a span among those from lo to hi.
func bar(from, to, lo, hi float64) string {
	cell := func(x float64) int {
		return min(max(int(math.Floor((x-lo)/max(hi-lo, 1e-9)*barWidth)), 0), barWidth-1)
	}
	a, b := cell(from), cell(to)
	return strings.Repeat(".", a) + strings.Repeat("#", b-a+1) + strings.Repeat(".", barWidth-1-b)
}

// Print writes the timeline, or with asJSON the document.
func (t *Trace) Print(w io.Writer, asJSON bool) error {
	if asJSON {
		return printJSON(w, t)
	}
	if q := t.Request; q == nil {
		fmt.Fprintf(w, "request is still being served by router %s; what it has decided so far:\n", t.Router)
	} else {
		fmt.Fprintf(w, "request %s by router %s at %s\n  %s, %s %s, %s\n", q.name(), t.Router, q.Time.Format(time.RFC3339Nano), q.ending(), q.Endpoint, q.Model, q.tokens())
	}
	lo, hi := 0.0, 0.0
	for _, r := range t.Rows {
		if r.Error == "" {
			lo, hi = min(lo, r.FromMS), max(hi, r.ToMS)
		}
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "\nWHO\tWHAT\tFROM ms\tTO ms\tTOOK ms\t%s\t\n", fmt.Sprintf("%-*s", barWidth, fmt.Sprintf("%.1f to %.1f ms", lo, hi)))
	for _, r := range t.Rows {
		if r.Error != "" {
			fmt.Fprintf(tw, "%s\t%s\t-\t-\t-\t%s\t%s\n", r.Who, r.What, strings.Repeat(" ", barWidth), r.Error)
			continue
		}
		fmt.Fprintf(tw, "%s\t%s\t%.3f\t%.3f\t%.3f\t%s\t%s\n", r.Who, r.What, r.FromMS, r.ToMS, r.ToMS-r.FromMS, bar(r.FromMS, r.ToMS, lo, hi), r.Note)
	}
	return tw.Flush()
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func (q *Request) name() string {
	if q.RequestID == q.ID {
		return q.ID
	}
	return q.RequestID + " (" + q.ID + ")"
}

func (q *Request) ending() string {
	s := fmt.Sprintf("%d %s after %.1f ms", q.Code, q.Outcome, q.TotalMS)
	if q.Cause != "" {
		s += " while " + q.Phase + ": " + q.Cause
	}
	if q.Error != "" {
		s += ": " + q.Error
	}
	return s
}

func (q *Request) tokens() string {
	if q.PromptTokens == nil {
		return fmt.Sprintf("%d tokens", q.Tokens)
	}
	return fmt.Sprintf("%d prompt tokens (%d cached), %d tokens", *q.PromptTokens, *q.CachedTokens, q.Tokens)
}

// PrintList writes requests as a table, or with asJSON as an array.
func PrintList(w io.Writer, list []Request, asJSON bool) error {
	if asJSON {
		return printJSON(w, list)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "REQUEST\tAT\tENDPOINT\tMODEL\tENDED\tTOKENS\tQUEUED ms\tFIRST ms\tTOTAL ms\tATTEMPTS\tWORKERS\n")
	for i := range list {
		q := &list[i]
		workers := "-"
		if n := len(q.Attempts); n > 0 {
			workers = who(q.Attempts[n-1].Prefill, q.Attempts[n-1].Decode, q.Attempts[n-1].Whole)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%d %s\t%d\t%.1f\t%.1f\t%.1f\t%d\t%s\n", q.RequestID, q.Time.Format("15:04:05.000"), q.Endpoint, q.Model, q.Code, q.Outcome, q.Tokens, q.QueuedMS, q.FirstMS, q.TotalMS, len(q.Attempts), workers)
	}
	return tw.Flush()
}
