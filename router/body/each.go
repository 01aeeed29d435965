package body

import "bytes"

// Each calls f with each member's name, its escapes undone, and its value as the client wrote it. Of several of a name the
// last counts, as in the engines' parsers. Both are valid during the call.
func (p *Body) Each(f func(name, value []byte)) {
	for i := range p.members {
		m := &p.members[i]
		f(unescaped(p.raw[m.start:m.keyEnd]), p.raw[m.value:m.end])
	}
}

// Rewritten is a body like p without the members that drop names, and with further ones.
func (p *Body) Rewritten(drop map[string]bool, added []byte) (*Body, error) {
	next, err := Parse(bytes.Join(p.Without(drop, added), nil))
	if err != nil {
		return nil, err
	}
	return next, nil
}
