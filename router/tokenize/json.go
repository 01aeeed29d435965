package tokenize

import (
	"bytes"
	"encoding/json"
	"errors"
)

// The body has been checked to be JSON by router/body when it gets here; these functions skip over it without checking
// again, and only make sure that they stay inside.

var errJSON = errors.New("not valid JSON")

// skipSpace returns the index of the first byte at or behind i that is not white space.
func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipString returns the index behind the string that opens at b[i], -1 where it does not end.
func skipString(b []byte, i int) int {
	for at := i + 1; ; {
		n := bytes.IndexByte(b[at:], '"')
		if n < 0 {
			return -1
		}
		at += n + 1
		escapes := 0
		for k := at - 2; k > i && b[k] == '\\'; k-- {
			escapes++
		}
		if escapes%2 == 0 {
			return at
		}
	}
}

// skipValue returns the index behind the value that begins at b[i], -1 where it does not end.
func skipValue(b []byte, i int) int {
	if i >= len(b) {
		return -1
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		for depth := 0; i < len(b); {
			switch b[i] {
			case '"':
				if i = skipString(b, i); i < 0 {
					return -1
				}
				continue
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
			i++
		}
		return -1
	}
	start := i
	for i < len(b) {
		switch b[i] {
		case ',', '}', ']', ' ', '\n', '\t', '\r':
			return max(i, start+1)
		}
		i++
	}
	return i
}

// walkObject calls f for each member of the object that is b, key without quotes.
func walkObject(b []byte, f func(key, value []byte) error) error {
	i := skipSpace(b, 0)
	if i >= len(b) || b[i] != '{' {
		return errJSON
	}
	i = skipSpace(b, i+1)
	for i < len(b) && b[i] == '"' {
		end := skipString(b, i)
		if end < 0 {
			return errJSON
		}
		key := b[i+1 : end-1]
		if bytes.IndexByte(key, '\\') >= 0 {
			var s string
			if json.Unmarshal(b[i:end], &s) != nil {
				return errJSON
			}
			key = []byte(s)
		}
		i = skipSpace(b, end)
		if i >= len(b) || b[i] != ':' {
			return errJSON
		}
		i = skipSpace(b, i+1)
		if end = skipValue(b, i); end < 0 {
			return errJSON
		}
		if err := f(key, b[i:end]); err != nil {
			return err
		}
		i = skipSpace(b, end)
		if i < len(b) && b[i] == ',' {
			i = skipSpace(b, i+1)
		}
	}
	if i >= len(b) || b[i] != '}' {
		return errJSON
	}
	return nil
}

// appendItems appends the items of the array that is b to dst.
func appendItems(dst [][]byte, b []byte) ([][]byte, error) {
	i := skipSpace(b, 0)
	if i >= len(b) || b[i] != '[' {
		return dst, errJSON
	}
	i = skipSpace(b, i+1)
	for i < len(b) && b[i] != ']' {
		end := skipValue(b, i)
		if end < 0 {
			return dst, errJSON
		}
		dst = append(dst, b[i:end])
		i = skipSpace(b, end)
		if i < len(b) && b[i] == ',' {
			i = skipSpace(b, i+1)
		}
	}
	if i >= len(b) {
		return dst, errJSON
	}
	return dst, nil
}

// isNull tells whether a value is null, or was not there.
func isNull(v []byte) bool { return len(v) == 0 || string(v) == "null" }

// isString tells whether a value is a string.
func isString(v []byte) bool { return len(v) >= 2 && v[0] == '"' }

// unquote returns what a JSON string means.
func unquote(v []byte) (string, error) {
	if !isString(v) {
		return "", errJSON
	}
	inner := v[1 : len(v)-1]
	plain := true
	for _, c := range inner {
		if c == '\\' || c >= 0x80 {
			plain = false
			break
		}
	}
	if plain {
		return string(inner), nil
	}
	var s string
	if err := json.Unmarshal(v, &s); err != nil {
		return "", errJSON
	}
	return s, nil
}
