package planner

import (
	"fmt"
	"strconv"
)

func parseNumber(s string) (float64, error) { return strconv.ParseFloat(s, 64) }

// static wants always the same pools.
type static struct{ want Pools }

// newStatic takes prefill and decode, or whole, as numbers of engines.
func newStatic(c Config, p *params) *static {
	if c.Limits.Undivided {
		return &static{want: Pools{Whole: int(p.get("whole", 4, 1, 1e6))}}
	}
	return &static{want: Pools{Prefill: int(p.get("prefill", 4, 1, 1e6)), Decode: int(p.get("decode", 4, 1, 1e6))}}
}

func (s *static) Name() string { return "static" }

func (s *static) Step(*Observation) Decision {
	return Decision{Want: s.want, Reason: fmt.Sprintf("always %s", s.want)}
}

func (s *static) State() ([]byte, error) { return []byte("{}"), nil }
func (s *static) Restore([]byte) error   { return nil }

var _ Planner = (*static)(nil)
