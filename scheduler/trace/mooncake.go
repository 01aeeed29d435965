package trace

import (
	"fmt"
	"time"

	"github.com/tidwall/gjson"
)

// mooncake reads a JSON object a line: timestamp in milliseconds, input_length, output_length, and hash_ids of the prompt's
// blocks (kvcache-ai/Mooncake, FAST25-release).
type mooncake struct {
	lines lines
	first time.Duration
	last  time.Duration
	begun bool
}

func (m *mooncake) Next(r *Request) error {
	line, err := m.lines.next()
	if err != nil {
		return err
	}
	if !gjson.ValidBytes(line) || line[0] != '{' {
		return fmt.Errorf("read trace, line %d: no JSON object", m.lines.number)
	}
	blocks := r.Blocks[:0]
	*r = Request{}
	at, bad := time.Duration(0), ""
	gjson.ParseBytes(line).ForEach(func(key, value gjson.Result) bool {
		name := key.String()
		switch name {
		case "timestamp":
			if ms := value.Float(); value.Type == gjson.Number && ms >= 0 && ms <= float64(atMax/time.Millisecond) {
				at = time.Duration(ms * float64(time.Millisecond))
				return true
			}
		case "input_length", "output_length":
			if n := value.Float(); value.Type == gjson.Number && n >= 0 && n <= tokensMax {
				if name == "input_length" {
					r.Prompt = int(n)
				} else {
					r.Output = int(n)
				}
				return true
			}
		case "hash_ids":
			value.ForEach(func(_, id gjson.Result) bool {
				blocks = append(blocks, id.Uint())
				return true
			})
			return true
		default:
			return true
		}
		bad = name
		return false
	})
	if bad != "" {
		return fmt.Errorf("read trace, line %d: %s is no number, or out of bounds", m.lines.number, bad)
	}
	if !m.begun {
		m.first, m.begun = at, true
	}
	r.At, r.Blocks = at-m.first, blocks
	if err := check(r, m.last, m.lines.number); err != nil {
		return err
	}
	m.last = r.At
	return nil
}

var _ Reader = (*mooncake)(nil)
