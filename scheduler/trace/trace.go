// Package trace reads traces of requests to inference engines, a request at a time, in the forms in which their makers publish
// them. It knows neither engines nor planners.
package trace

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"time"
)

// Request is one request of a trace.
type Request struct {
	// At is when it comes, since the trace's first request.
	At time.Duration
	// Prompt and Output are its tokens, those of the prompt that may be cached included. Both are at least 1.
	Prompt, Output int
	// Blocks name the prompt's blocks of BlockTokens tokens, the last one not full mostly: two prompts that are equal up to and with
	// a block have the same numbers up to there. Empty where a trace tells nothing of prompts' beginnings.
	Blocks []uint64
}

const (
	// BlockTokens is the length of the blocks that a trace names.
	BlockTokens = 512
	// Limits on what one line may say.
	lineBytesMax = 1 << 20
	tokensMax    = 1 << 24
	atMax        = 10 * 365 * 24 * time.Hour
)

// Reader gives a trace's requests in order of time.
type Reader interface {
	// Next puts the next request into r, whose Blocks it uses again, or returns io.EOF.
	Next(r *Request) error
}

// NewReader tells the form of a trace by its first line: a JSON object a line is Mooncake's, comma-separated values with a header
// Azure's.
func NewReader(r io.Reader) (Reader, error) {
	buffered := bufio.NewReaderSize(r, 64<<10)
	for {
		first, err := buffered.Peek(1)
		switch {
		case errors.Is(err, io.EOF):
			return nil, errors.New("read trace: it is empty")
		case err != nil:
			return nil, fmt.Errorf("read trace: %w", err)
		case first[0] == '\n' || first[0] == '\r' || first[0] == ' ':
			_, _ = buffered.Discard(1) // it was peeked at
		case first[0] == '{':
			return &mooncake{lines: newLines(buffered)}, nil
		default:
			return newAzure(buffered)
		}
	}
}

// lines gives a text's lines that are not empty, with their numbers.
type lines struct {
	scanner *bufio.Scanner
	number  int
}

func newLines(r io.Reader) lines {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 0, 64<<10), lineBytesMax)
	return lines{scanner: s}
}

func (l *lines) next() ([]byte, error) {
	for l.scanner.Scan() {
		l.number++
		if line := bytes.TrimSpace(l.scanner.Bytes()); len(line) > 0 {
			return line, nil
		}
	}
	if err := l.scanner.Err(); err != nil {
		return nil, fmt.Errorf("read trace, line %d: %w", l.number+1, err)
	}
	return nil, io.EOF
}

// check holds what both forms promise.
func check(r *Request, last time.Duration, line int) error {
	switch {
	case r.Prompt < 1 || r.Prompt > tokensMax || r.Output < 1 || r.Output > tokensMax:
		return fmt.Errorf("read trace, line %d: a prompt of %d and an answer of %d tokens; both must be 1 to %d", line, r.Prompt, r.Output, tokensMax)
	case r.At < last:
		return fmt.Errorf("read trace, line %d: its time is before that of the line before; sort the trace by time", line)
	case r.At > atMax:
		return fmt.Errorf("read trace, line %d: its time is %s after the first; at most %s", line, r.At, atMax)
	case len(r.Blocks) > 0 && (len(r.Blocks)*BlockTokens < r.Prompt || (len(r.Blocks)-1)*BlockTokens >= r.Prompt):
		return fmt.Errorf("read trace, line %d: %d hash_ids of %d tokens for a prompt of %d", line, len(r.Blocks), BlockTokens, r.Prompt)
	}
	return nil
}

// ReadAll reads what is left of a trace.
func ReadAll(r Reader) ([]Request, error) {
	var all []Request
	for {
		var q Request
		switch err := r.Next(&q); {
		case errors.Is(err, io.EOF) && len(all) == 0:
			return nil, errors.New("read trace: it has no requests")
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		}
		all = append(all, q)
	}
}

// Slice is a Reader of requests in memory, that come Rate times as fast (0 is 1).
type Slice struct {
	Requests []Request
	Rate     float64
}

// Next implements Reader.
func (s *Slice) Next(r *Request) error {
	if len(s.Requests) == 0 {
		return io.EOF
	}
	q := &s.Requests[0]
	s.Requests = s.Requests[1:]
	r.At, r.Prompt, r.Output = q.At, q.Prompt, q.Output
	r.Blocks = append(r.Blocks[:0], q.Blocks...)
	if s.Rate > 0 {
		r.At = time.Duration(float64(r.At) / s.Rate)
	}
	return nil
}

// Faster is a Reader whose requests come so many times as fast.
type Faster struct {
	Reader Reader
	Rate   float64
}

// Next implements Reader.
func (f *Faster) Next(r *Request) error {
	if err := f.Reader.Next(r); err != nil {
		return err
	}
	r.At = time.Duration(float64(r.At) / f.Rate)
	return nil
}
