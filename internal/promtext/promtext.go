// Package promtext reads metrics in Prometheus' text format, the few samples that its caller wants: what is of no
// interest costs no more than finding its line's end. It must not know what a sample means.
package promtext

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Limits of what one answer may have. An engine's has some hundred kilobytes.
const (
	BytesMax     = 8 << 20
	LineBytesMax = 64 << 10
	SamplesMax   = 4096 // that are wanted
)

// Sample is one line.
type Sample struct {
	Name   string
	Labels map[string]string // nil when there are none
	Value  float64           // may be NaN or infinite
}

// ErrLimit is what Read stops at when an answer is beyond the limits.
var ErrLimit = errors.New("metrics are beyond what is read of them")

// Read calls each for the samples whose name is wanted, in their order. It goes on behind lines that it cannot read, and
// returns an error for the first of those that were wanted; it stops at r's errors and at the limits.
func Read(r io.Reader, wanted func(name []byte) bool, each func(Sample)) error {
	limited := &io.LimitedReader{R: r, N: BytesMax + 1}
	lines := bufio.NewScanner(limited)
	lines.Buffer(make([]byte, 0, 4096), LineBytesMax)
	samples := 0
	var torn error
	for lines.Scan() {
		line := bytes.TrimLeft(lines.Bytes(), " \t")
		name := line
		if i := bytes.IndexAny(line, "{ \t"); i >= 0 {
			name = line[:i]
		}
		if len(name) == 0 || name[0] == '#' || !wanted(name) {
			continue
		}
		if samples++; samples > SamplesMax {
			return fmt.Errorf("%w: more than %d samples", ErrLimit, SamplesMax)
		}
		s, err := parse(string(name), string(line[len(name):]))
		switch {
		case err == nil:
			each(s)
		case torn == nil:
			torn = fmt.Errorf("read %.100q: %w", line, err)
		}
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return fmt.Errorf("%w: a line of more than %d bytes", ErrLimit, LineBytesMax)
	case err != nil:
		return err
	case limited.N <= 0:
		return fmt.Errorf("%w: more than %d bytes", ErrLimit, BytesMax)
	}
	return torn
}

// parse reads what stands behind a sample's name: {label="value",...} VALUE, and a time that does not matter.
func parse(name, rest string) (s Sample, err error) {
	s.Name = name
	if strings.HasPrefix(rest, "{") {
		if s.Labels, rest, err = parseLabels(rest[1:]); err != nil {
			return s, err
		}
	}
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return s, errors.New("no value")
	}
	s.Value, err = strconv.ParseFloat(fields[0], 64)
	return s, err
}

var errTorn = errors.New("the labels have no end")

func parseLabels(s string) (labels map[string]string, rest string, err error) {
	labels = map[string]string{}
	for {
		s = strings.TrimLeft(s, ", \t")
		if s == "" {
			return nil, "", errTorn
		}
		if s[0] == '}' {
			return labels, s[1:], nil
		}
		key, after, found := strings.Cut(s, `="`)
		if !found {
			return nil, "", errTorn
		}
		value, n := unquote(after)
		if n < 0 {
			return nil, "", errTorn
		}
		labels[strings.TrimSpace(key)], s = value, after[n:]
	}
}

// unquote reads a value up to its closing quote, and says how much of s that took; -1 when there is none.
func unquote(s string) (value string, n int) {
	end := strings.IndexAny(s, `"\`)
	if end >= 0 && s[end] == '"' {
		return s[:end], end + 1
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '"':
			return b.String(), i + 1
		case s[i] == '\\' && i+1 < len(s):
			if i++; s[i] == 'n' {
				b.WriteByte('\n')
			} else {
				b.WriteByte(s[i])
			}
		default:
			b.WriteByte(s[i])
		}
	}
	return "", -1
}
