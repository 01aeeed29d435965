// Package openaitest is for tests that read what a worker or a router writes.
package openaitest

import (
	"bytes"
	"io"

	"github.com/headrace/headrace/internal/openai"
)

// Scanner reads events off a stream. The slices of an event are valid until the next call of Next.
type Scanner struct {
	r          io.Reader
	buf        []byte
	start, end int
	scanned    int // bytes behind start that hold no event end
	err        error
}

// NewScanner makes a Scanner over r. buf may be nil; it grows up to openai.EventBytesMax.
func NewScanner(r io.Reader, buf []byte) *Scanner {
	buf = buf[:cap(buf)]
	if len(buf) < 4096 {
		buf = make([]byte, 16<<10)
	}
	return &Scanner{r: r, buf: buf}
}

// Next returns the next event. At the end it returns io.EOF, or io.ErrUnexpectedEOF within an event.
func (s *Scanner) Next() (openai.Event, error) {
	for {
		if window := s.buf[s.start:s.end]; bytes.IndexByte(window[s.scanned:], '\n') >= 0 {
			ev, n, err := openai.NextEvent(window)
			if err != nil {
				return openai.Event{}, err
			}
			if n > 0 {
				s.start += n
				s.scanned = 0
				return ev, nil
			}
		}
		if s.err != nil {
			if s.err == io.EOF && len(bytes.Trim(s.buf[s.start:s.end], "\n")) > 0 {
				return openai.Event{}, io.ErrUnexpectedEOF
			}
			return openai.Event{}, s.err
		}
		if err := s.fill(); err != nil {
			return openai.Event{}, err
		}
	}
}

func (s *Scanner) fill() error {
	// The last byte may be the line end whose empty line is still to come.
	s.scanned = max(0, s.end-s.start-1)
	if s.end == len(s.buf) {
		if s.start > 0 {
			copy(s.buf, s.buf[s.start:s.end])
			s.end -= s.start
			s.start = 0
		} else {
			if len(s.buf) >= openai.EventBytesMax {
				return openai.ErrEventTooLarge
			}
			s.buf = append(s.buf, make([]byte, len(s.buf))...)
		}
	}
	for range 100 {
		n, err := s.r.Read(s.buf[s.end:])
		s.end += n
		if n > 0 || err != nil {
			s.err = err
			return nil
		}
	}
	return io.ErrNoProgress
}
