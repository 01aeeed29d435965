package openai

// sequence reports the length of the UTF-8 sequence that s begins with and whether it is valid. When it is not, n is
// the length of its maximal invalid part, which Unicode, Rust and Python replace by one U+FFFD. s is not empty.
func sequence[T string | []byte](s T) (n int, ok bool) {
	n, ok, _ = sequencePart(s)
	return n, ok
}

// sequencePart is sequence, and partial says that s ends within a sequence that is valid so far.
func sequencePart[T string | []byte](s T) (n int, ok, partial bool) {
	c := s[0]
	lo, hi := byte(0x80), byte(0xBF)
	var need int
	switch {
	case c < 0x80:
		return 1, true, false
	case c >= 0xC2 && c <= 0xDF:
		need = 2
	case c >= 0xE0 && c <= 0xEF:
		need = 3
		switch c {
		case 0xE0:
			lo = 0xA0
		case 0xED:
			hi = 0x9F
		}
	case c >= 0xF0 && c <= 0xF4:
		need = 4
		switch c {
		case 0xF0:
			lo = 0x90
		case 0xF4:
			hi = 0x8F
		}
	default:
		return 1, false, false
	}
	for n = 1; n < need; n++ {
		if n >= len(s) {
			return n, false, true
		}
		if s[n] < lo || s[n] > hi {
			return n, false, false
		}
		lo, hi = 0x80, 0xBF
	}
	return need, true, false
}
