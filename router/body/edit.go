package body

// Whole returns the body as the client sent it, and with Extra.
func (p *Body) Whole() [][]byte {
	if p.Extra != "" {
		return p.With(nil)
	}
	return p.whole[:]
}

// With returns the body in pieces, the client's bytes with further members and Extra behind its own. added is such as
// `"a":1,"b":2`; the body must not have members of these names.
func (p *Body) With(added []byte) [][]byte {
	pieces := append(make([][]byte, 0, 6), p.raw[:p.closing])
	for _, more := range [][]byte{added, []byte(p.Extra)} {
		if len(more) == 0 {
			continue
		}
		if len(p.members) > 0 || len(pieces) > 1 {
			pieces = append(pieces, []byte{','})
		}
		pieces = append(pieces, more)
	}
	return append(pieces, p.raw[p.closing:])
}

// Without is With for a body that lacks the members that drop names, however often they are given.
func (p *Body) Without(drop map[string]bool, added []byte) [][]byte {
	pieces := [][]byte{{'{'}}
	comma := []byte{','}
	for i := 0; i < len(p.members); i++ {
		if p.named(i, drop) {
			continue
		}
		from := p.members[i].start
		for i+1 < len(p.members) && !p.named(i+1, drop) { // neighbours stay as they are
			i++
		}
		if len(pieces) > 1 {
			pieces = append(pieces, comma)
		}
		pieces = append(pieces, p.raw[from:p.members[i].end])
	}
	if len(pieces) > 1 && len(added) > 0 {
		pieces = append(pieces, comma)
	}
	return append(pieces, added, []byte{'}'})
}

func (p *Body) named(i int, names map[string]bool) bool {
	m := &p.members[i]
	return names[string(unescaped(p.raw[m.start:m.keyEnd]))]
}

// Value returns the value of a member as the client wrote it, nil when there is none or it is null. Of several of the
// name the last counts, as in the engines' parsers.
func (p *Body) Value(name string) []byte {
	for i := len(p.members) - 1; i >= 0; i-- {
		m := &p.members[i]
		if string(unescaped(p.raw[m.start:m.keyEnd])) != name {
			continue
		}
		if v := p.raw[m.value:m.end]; string(v) != "null" {
			return v
		}
		return nil
	}
	return nil
}

// Prompts tells how many prompts a completion's prompt is: 1 for a string or a list of token ids, else the length of
// the list.
func (p *Body) Prompts() int { return max(1, Batch(p.Value("prompt"))) }

// Batch tells how many prompts are in a list of them, texts or lists of token ids; 0 for what is one prompt, v being a value of
// the body.
func Batch(v []byte) int {
	if len(v) == 0 || v[0] != '[' {
		return 0
	}
	i := skipSpace(v, 1)
	if v[i] != '"' && v[i] != '[' {
		return 0
	}
	for n := 1; ; n++ {
		s := scanner{b: v, i: i, member: func(span, span) error { return nil }}
		if s.run() != nil { // it was scanned before
			return n
		}
		if i = skipSpace(v, s.i); i >= len(v) || v[i] != ',' {
			return n
		}
		i = skipSpace(v, i+1)
	}
}

// Member returns the value of a member of the JSON object b, nil when b is no such object or the member is missing or
// null.
func Member(b []byte, name string) []byte {
	var found []byte
	_, err := scan(b, func(key, value span) error {
		if string(unescaped(b[key.start:key.end])) == name {
			found = b[value.start:value.end]
		}
		return nil
	})
	if err != nil || string(found) == "null" {
		return nil
	}
	return found
}
