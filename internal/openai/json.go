package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/tidwall/gjson"
)

// depthMax bounds the nesting of a request body: gjson.Valid recurses, and a stack overflow cannot be recovered from.
const depthMax = 64

const hexDigits = "0123456789abcdef"

// AppendString appends s as a JSON string. Bytes that are not UTF-8 become U+FFFD, one for each maximal invalid part.
func AppendString[T string | []byte](dst []byte, s T) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= 0x20 && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			n, ok := sequence(s[i:])
			if ok && !lineSeparator(s[i:]) {
				i += n
				continue
			}
			dst = append(dst, s[start:i]...)
			if ok { // U+2028 and U+2029: legal JSON, but no JavaScript string literal of old
				dst = append(dst, `\u202`...)
				dst = append(dst, hexDigits[s[i+2]&0xf])
			} else {
				dst = append(dst, "\uFFFD"...)
			}
			i += n
			start = i
			continue
		}
		dst = append(dst, s[start:i]...)
		dst = appendEscape(dst, c)
		i++
		start = i
	}
	dst = append(dst, s[start:]...)
	return append(dst, '"')
}

func appendEscape(dst []byte, c byte) []byte {
	switch c {
	case '"', '\\':
		return append(dst, '\\', c)
	case '\n':
		return append(dst, '\\', 'n')
	case '\r':
		return append(dst, '\\', 'r')
	case '\t':
		return append(dst, '\\', 't')
	}
	return append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&0xf])
}

func lineSeparator[T string | []byte](s T) bool {
	return len(s) >= 3 && s[0] == 0xE2 && s[1] == 0x80 && s[2]&0xFE == 0xA8
}

func appendStringOrNull(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return AppendString(dst, s)
}

func appendInts(dst []byte, ids []int32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(id), 10)
	}
	return append(dst, ']')
}

// field is one member of the top-level object: body[Start:End] is `"key": value`, Value the value's bytes.
type field struct {
	key        string
	start, end int
	value      []byte
}

var errNotObject = errors.New("the body must be a JSON object")

// checkJSON says whether body is one valid JSON value of bounded depth.
func checkJSON(body []byte) error {
	depth := 0
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '"':
			i = stringEnd(body, i) - 1
		case '{', '[':
			if depth++; depth > depthMax {
				return fmt.Errorf("nested deeper than %d levels", depthMax)
			}
		case '}', ']':
			depth--
		}
	}
	if !gjson.ValidBytes(body) {
		return errors.New("not valid JSON")
	}
	return nil
}

// walkObject calls f for each member of the object in body, in order, duplicates too. body must have passed checkJSON.
func walkObject(body []byte, f func(field) error) error {
	i := skipSpace(body, 0)
	if i >= len(body) || body[i] != '{' {
		return errNotObject
	}
	i = skipSpace(body, i+1)
	for i < len(body) && body[i] == '"' {
		fd := field{start: i}
		keyEnd := stringEnd(body, i)
		key, err := unquote(body[i:keyEnd])
		if err != nil {
			return err
		}
		fd.key = key
		valueStart := skipSpace(body, skipSpace(body, keyEnd)+1) // past the colon
		fd.end = valueEnd(body, valueStart)
		fd.value = body[valueStart:fd.end]
		if err := f(fd); err != nil {
			return err
		}
		i = skipSpace(body, fd.end)
		if i >= len(body) || body[i] != ',' {
			return nil
		}
		i = skipSpace(body, i+1)
	}
	return nil
}

// parseObject calls set for each member that is not null. Errors name the member.
func parseObject(v []byte, set func(key string, v []byte) error) error {
	err := walkObject(v, func(f field) error {
		if isNull(f.value) {
			return nil
		}
		if err := set(f.key, f.value); err != nil {
			return fmt.Errorf("%s: %w", f.key, err)
		}
		return nil
	})
	if errors.Is(err, errNotObject) {
		return errors.New("must be an object")
	}
	return err
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\t' || b[i] == '\n' || b[i] == '\r') {
		i++
	}
	return i
}

// stringEnd returns the index behind the string that opens at b[i], or len(b).
func stringEnd(b []byte, i int) int {
	for i++; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(b)
}

func valueEnd(b []byte, i int) int {
	if i >= len(b) {
		return len(b)
	}
	switch b[i] {
	case '"':
		return stringEnd(b, i)
	case '{', '[':
		for depth := 0; i < len(b); i++ {
			switch b[i] {
			case '"':
				i = stringEnd(b, i) - 1
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
		}
		return len(b)
	}
	for i < len(b) {
		switch b[i] {
		case ',', '}', ']', ' ', '\t', '\n', '\r':
			return i
		}
		i++
	}
	return len(b)
}

func isNull(v []byte) bool { return len(v) == 4 && v[0] == 'n' }

// unquote reads a JSON string. Lone surrogates and bytes that are not UTF-8 become U+FFFD.
func unquote(v []byte) (string, error) {
	if len(v) < 2 || v[0] != '"' {
		return "", errors.New("must be a string")
	}
	plain := true
	for _, c := range v[1 : len(v)-1] {
		if c == '\\' || c >= utf8.RuneSelf {
			plain = false
			break
		}
	}
	if plain {
		return string(v[1 : len(v)-1]), nil
	}
	var s string
	if err := json.Unmarshal(v, &s); err != nil {
		return "", errors.New("must be a string")
	}
	return s, nil
}

func parseBool(v []byte) (bool, error) {
	switch string(v) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, errors.New("must be true or false")
}

// parseInt reads an integer without passing through a float, so that seeds over 2^53 keep every bit.
// 16.0 is taken too: some clients send it.
func parseInt(v []byte) (int64, error) {
	if n, err := strconv.ParseInt(string(v), 10, 64); err == nil {
		return n, nil
	}
	f, err := strconv.ParseFloat(string(v), 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, errors.New("must be an integer")
	}
	return int64(f), nil
}

// parseSeed reads any integer of 64 bits, signed or not: -1 and 2^64-1 are the same seed.
func parseSeed(v []byte) (uint64, error) {
	if n, err := strconv.ParseUint(string(v), 10, 64); err == nil {
		return n, nil
	}
	n, err := parseInt(v)
	return uint64(n), err
}

func parseFloat(v []byte) (float64, error) {
	if len(v) == 0 || (v[0] != '-' && (v[0] < '0' || v[0] > '9')) {
		return 0, errors.New("must be a number")
	}
	f, err := strconv.ParseFloat(string(v), 64)
	if err != nil {
		return 0, errors.New("must be a finite number")
	}
	return f, nil
}

// walkArray calls f for each element. v must have passed checkJSON.
func walkArray(v []byte, f func([]byte) error) error {
	if len(v) == 0 || v[0] != '[' {
		return errors.New("must be an array")
	}
	i := skipSpace(v, 1)
	for i < len(v) && v[i] != ']' {
		end := valueEnd(v, i)
		if err := f(v[i:end]); err != nil {
			return err
		}
		i = skipSpace(v, end)
		if i < len(v) && v[i] == ',' {
			i = skipSpace(v, i+1)
		}
	}
	return nil
}

func parseTokens(v []byte, max int) ([]int32, error) {
	ids := []int32{}
	err := walkArray(v, func(e []byte) error {
		if len(ids) >= max {
			return fmt.Errorf("must have at most %d token ids", max)
		}
		n, err := strconv.ParseInt(string(e), 10, 32)
		if err != nil || n < 0 {
			return errors.New("must be an array of token ids")
		}
		ids = append(ids, int32(n))
		return nil
	})
	return ids, err
}
