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
	last  string // the last line that was not empty
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
	if s.file == nil {
		return
	}
	if s.bytes > logBytesMax {
		_ = s.file.Close()
		_ = os.Rename(s.path, s.path+".1")
		if s.open() != nil {
			s.file = nil // a full disk must not stop the child
			return
		}
	}
	n, _ := fmt.Fprintf(s.file, "%s\n", line)
	s.bytes += int64(n)
}

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
