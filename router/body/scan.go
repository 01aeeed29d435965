package body

import (
	"encoding/binary"
	"errors"
	"math/bits"
)

// depthMax bounds the nesting of a request's JSON: engines parse it with recursive parsers.
const depthMax = 64

var (
	errSyntax    = errors.New("not valid JSON")
	errDepth     = errors.New("nested deeper than 64 levels")
	errNotObject = errors.New("not a JSON object")
)

// span is b[start:end].
type span struct{ start, end int }

// scan checks that b is exactly one JSON object and calls member for each of its own members in order, with the spans
// of the key (quotes included) and of the value. It does not recurse, so that depth costs no stack.
// It returns the index of the closing brace.
func scan(b []byte, member func(key, value span) error) (int, error) {
	i := skipSpace(b, 0)
	if i >= len(b) || b[i] != '{' {
		if len(b) > 0 && i < len(b) {
			return 0, errNotObject
		}
		return 0, errSyntax
	}
	s := scanner{b: b, i: i, member: member}
	if err := s.run(); err != nil {
		return 0, err
	}
	closing := s.i - 1
	if skipSpace(b, s.i) != len(b) {
		return 0, errSyntax
	}
	return closing, nil
}

type scanner struct {
	b       []byte
	i       int
	depth   int
	objects [depthMax]bool // whether the level is an object
	key     span           // of the top-level member being read
	value   int            // where its value starts
	member  func(key, value span) error
}

// run reads one value with everything in it.
func (s *scanner) run() error {
	for {
		opened, err := s.openValue()
		if err != nil {
			return err
		}
		if opened {
			continue
		}
		for { // behind a whole value: close what ends here
			if s.depth == 0 {
				return nil
			}
			again, err := s.behindValue()
			if err != nil {
				return err
			}
			if again {
				break
			}
		}
	}
}

// openValue reads a scalar, an empty container, or the opening of one up to where its first value starts (opened).
func (s *scanner) openValue() (opened bool, err error) {
	b := s.b
	if s.i >= len(b) {
		return false, errSyntax
	}
	switch c := b[s.i]; c {
	case '{', '[':
		if s.depth == depthMax {
			return false, errDepth
		}
		s.objects[s.depth] = c == '{'
		s.depth++
		s.i = skipSpace(b, s.i+1)
		if s.i >= len(b) {
			return false, errSyntax
		}
		if b[s.i] == c+2 { // '}' and ']' are two behind their openings
			s.depth--
			s.i++
			return false, nil
		}
		if c == '{' {
			return true, s.readKey()
		}
		return true, nil
	case '"':
		s.i, err = skipString(b, s.i)
		return false, err
	case 't':
		return false, s.literal("true")
	case 'f':
		return false, s.literal("false")
	case 'n':
		return false, s.literal("null")
	default:
		s.i, err = skipNumber(b, s.i)
		return false, err
	}
}

// behindValue reads the comma, and the key after it, or the closing; again says that a value follows.
func (s *scanner) behindValue() (again bool, err error) {
	b, object := s.b, s.objects[s.depth-1]
	if s.depth == 1 && object {
		if err := s.member(s.key, span{s.value, s.i}); err != nil {
			return false, err
		}
	}
	s.i = skipSpace(b, s.i)
	if s.i >= len(b) {
		return false, errSyntax
	}
	switch {
	case b[s.i] == ',':
		s.i = skipSpace(b, s.i+1)
		if object {
			return true, s.readKey()
		}
		return true, nil
	case object && b[s.i] == '}', !object && b[s.i] == ']':
		s.i++
		s.depth--
		return false, nil
	}
	return false, errSyntax
}

func (s *scanner) readKey() error {
	if s.i >= len(s.b) || s.b[s.i] != '"' {
		return errSyntax
	}
	end, err := skipString(s.b, s.i)
	if err != nil {
		return err
	}
	key := span{s.i, end}
	s.i = skipSpace(s.b, end)
	if s.i >= len(s.b) || s.b[s.i] != ':' {
		return errSyntax
	}
	s.i = skipSpace(s.b, s.i+1)
	if s.depth == 1 {
		s.key, s.value = key, s.i
	}
	return nil
}

func (s *scanner) literal(word string) error {
	if len(s.b)-s.i < len(word) || string(s.b[s.i:s.i+len(word)]) != word {
		return errSyntax
	}
	s.i += len(word)
	return nil
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipString returns the index behind the string that opens at b[i].
func skipString(b []byte, i int) (int, error) {
	for i++; ; {
		if i = skipPlain(b, i); i >= len(b) {
			return 0, errSyntax
		}
		switch b[i] {
		case '"':
			return i + 1, nil
		case '\\':
			if i++; i >= len(b) {
				return 0, errSyntax
			}
			switch b[i] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				i++
			case 'u':
				if len(b)-i < 5 || !hex4(b[i+1:i+5]) {
					return 0, errSyntax
				}
				i += 5
			default:
				return 0, errSyntax
			}
		default: // a control character
			return 0, errSyntax
		}
	}
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// skipPlain returns the index of the first byte from i on that means something in a string: a quote, a backslash or a
// control character; len(b) if there is none. It looks at eight bytes at once: a prompt is nearly all of a body.
func skipPlain(b []byte, i int) int {
	for i = skipWide(b, i); i+8 <= len(b); i += 8 {
		x := binary.LittleEndian.Uint64(b[i:])
		quote, slash := x^('"'*ones), x^('\\'*ones)
		// A byte's highest bit is set where it is below the subtrahend's and was not negative itself. A borrow can only
		// set further bits above a byte that is one already, so the lowest one is right.
		found := ((quote - ones) &^ quote) | ((slash - ones) &^ slash) | ((x - 0x20*ones) &^ x)
		if found &= highs; found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
	}
	for ; i < len(b); i++ {
		if c := b[i]; c == '"' || c == '\\' || c < 0x20 {
			return i
		}
	}
	return len(b)
}

func hex4(b []byte) bool {
	for _, c := range b {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') && (c < 'A' || c > 'F') {
			return false
		}
	}
	return true
}

func skipDigits(b []byte, i int) int {
	for i < len(b) && b[i] >= '0' && b[i] <= '9' {
		i++
	}
	return i
}

func skipNumber(b []byte, i int) (int, error) {
	if i < len(b) && b[i] == '-' {
		i++
	}
	switch {
	case i >= len(b):
		return 0, errSyntax
	case b[i] == '0':
		i++
	case b[i] >= '1' && b[i] <= '9':
		i = skipDigits(b, i)
	default:
		return 0, errSyntax
	}
	if i < len(b) && b[i] == '.' {
		end := skipDigits(b, i+1)
		if end == i+1 {
			return 0, errSyntax
		}
		i = end
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		end := skipDigits(b, i)
		if end == i {
			return 0, errSyntax
		}
		i = end
	}
	return i, nil
}
