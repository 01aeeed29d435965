package supervise

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"
)

const (
	lineBytesMax = 64 << 10
	// logBytesMax bounds a child's log; one older file is kept beside it.
	logBytesMax = 32 << 20
)

// logSink takes a child's lines, over all its lives.
type logSink struct {
	name   string
	path   string    // "" for no file
	stream io.Writer // nil, or where prefixed lines go; shared between children, so it locks itself

	mu    sync.Mutex // guards what follows
	file  *os.File
	bytes int64
	last  string    // the last line that was not empty
	lost  int       // lines that the disk had no room for, since the last that it took
	retry time.Time // when to open the file again
}

// lockedWriter lets children's lines mix but never within a line.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// openLog opens name's log in dir, or none when dir is "".
func openLog(dir, name string, stream io.Writer) (*logSink, error) {
	s := &logSink{name: name, stream: stream}
	if dir == "" {
		return s, nil
	}
	s.path = filepath.Join(dir, name+".log")
	return s, s.open()
}

func (s *logSink) open() error {
	f, err := os.OpenFile(s.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open log of %s: %w", s.name, err)
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("open log of %s: %w", s.name, err), f.Close())
	}
	s.file, s.bytes = f, info.Size()
	return nil
}

// drain reads lines until the child and whoever inherited its output have closed it.
func (s *logSink) drain(r io.Reader) {
	in := bufio.NewReaderSize(r, lineBytesMax)
	for {
		line, err := in.ReadSlice('\n') // a longer line is cut into several
		if len(line) > 0 {
			s.write(bytes.TrimRight(line, "\r\n"))
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

func (s *logSink) write(line []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(bytes.TrimSpace(line)) > 0 {
		s.last = string(line)
	}
	if s.stream != nil {
		_, _ = fmt.Fprintf(s.stream, "%-10s | %s\n", s.name, line)
	}
	if s.path != "" {
		s.append(line)
	}
}

// append writes a line to the file. A full disk must not stop the child: what it has no room for is dropped, counted, and
// spoken of as soon as there is room again. Whoever calls holds s.mu.
func (s *logSink) append(line []byte) {
	if s.file != nil && s.bytes > logBytesMax {
		_ = s.file.Close()
		_ = os.Rename(s.path, s.path+".1")
		s.file = nil
	}
	if s.file == nil {
		if now := time.Now(); now.Before(s.retry) || s.open() != nil {
			s.lost++
			if !now.Before(s.retry) {
				s.retry = now.Add(reopenAfter)
			}
			return
		}
	}
	text := fmt.Appendf(nil, "%s\n", line)
	if s.lost > 0 {
		text = append(fmt.Appendf(nil, "headrace up: %d lines of this log were lost: the disk was full\n", s.lost), text...)
	}
	n, err := s.file.Write(text)
	if err == nil {
		s.lost, s.bytes = 0, s.bytes+int64(n)
		return
	}
	s.lost++
	_ = s.file.Truncate(s.bytes) // no half lines
}

// reopenAfter is how often a log that could not be opened is tried again.
const reopenAfter = time.Second

func (s *logSink) lastLine() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

func (s *logSink) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file != nil {
		_ = s.file.Close()
		s.file = nil
	}
}
