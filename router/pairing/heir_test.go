package pairing

import (
	"strings"
	"testing"
	"time"
)

// TestHeir holds who takes a stream over, and when nobody does.
func TestHeir(t *testing.T) {
	worker := func(id string, change func(*Candidate)) Candidate {
		c := Candidate{Worker: &Worker{ID: id, Role: RoleDecode, Model: "m", NodeID: "node-" + id, NodeData: id + ":1", Dialect: "native", Fingerprint: "f", Blocks: 100, BlockTokens: 16}}
		if change != nil {
			change(&c)
		}
		return c
	}
	none := 0.
	for name, c := range map[string]struct {
		others []Candidate
		left   int64
		taken  string
		want   string
		why    string
		busy   bool
	}{
		"the one with less to do": {others: []Candidate{worker("b", func(c *Candidate) { c.Load.Decodes = 300 }), worker("c", nil)}, want: "c"},
		"it ends soon":            {others: []Candidate{worker("b", nil)}, left: 5, why: "ends where it is"},
		"it does not":             {others: []Candidate{worker("b", nil)}, left: 500, want: "b"},
		"nobody knows":            {others: []Candidate{worker("b", nil)}, want: "b"},
		"nobody":                  {why: "nobody else"},
		"another model":           {others: []Candidate{worker("b", func(c *Candidate) { c.Fingerprint = "g" })}, why: "nobody else"},
		"another name":            {others: []Candidate{worker("b", func(c *Candidate) { c.Model = "n" })}, why: "nobody else"},
		"it drains":               {others: []Candidate{worker("b", func(c *Candidate) { c.Weight = &none })}, why: "nobody else"},
		"it cools down":           {others: []Candidate{worker("b", func(c *Candidate) { c.CoolUntil = time.Unix(100, 0) })}, why: "nobody else"},
		"it prefills":             {others: []Candidate{worker("b", func(c *Candidate) { c.Role = RolePrefill })}, why: "nobody else"},
		"no daemon":               {others: []Candidate{worker("b", func(c *Candidate) { c.NodeID = "" })}, why: "nobody else"},
		"a foreign engine":        {others: []Candidate{worker("b", func(c *Candidate) { c.Dialect = DialectNixl })}, why: "nobody else"},
		"no room":                 {others: []Candidate{worker("b", func(c *Candidate) { c.Load.HeldTokens = 1500 })}, why: "nobody else"},
		"its cache is full":       {others: []Candidate{worker("b", func(c *Candidate) { c.Engine = Engine{Known: true, KVUsage: .99} })}, why: "nobody else"},
		"all come at once":        {others: []Candidate{worker("b", nil)}, taken: "b", why: "b is busy", busy: true},
		"one of two is taken":     {others: []Candidate{worker("b", nil), worker("c", func(c *Candidate) { c.Load.Decodes = 300 })}, taken: "b", want: "c", busy: true},
	} {
		from := worker("a", func(c *Candidate) { c.Weight = &none })
		v := &View{Now: time.Unix(1, 0), Workers: append([]Candidate{from}, c.others...)}
		to, why, busy := Heir(Request{ID: "r", Model: "m", PromptTokens: 200}, Leaving{From: from.Worker, Left: c.left, Taken: func(w *Worker) string {
			if w.ID == c.taken {
				return w.ID + " is busy"
			}
			return ""
		}}, v)
		got := ""
		if to != nil {
			got = to.ID
		}
		if got != c.want || !strings.Contains(why, c.why) || to == nil && busy != c.busy {
			t.Errorf("%s: %q because %q, busy %v; want %q", name, got, why, busy, c.want)
		}
	}
}
