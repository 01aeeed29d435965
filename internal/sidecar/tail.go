package sidecar

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	lineBytesMax = 64 << 10
	tailLines    = 400 // a traceback of vLLM's, of each of its processes
)

// tail passes an engine's lines on and remembers the last of them.
type tail struct {
	out io.Writer

	mu    sync.Mutex // guards what follows
	lines []string
	spoke time.Time // when the last came
	trace bool      // a traceback was among them
}

// drain reads until whoever holds the other end has closed it.
func (t *tail) drain(r io.Reader) {
	in := bufio.NewReaderSize(r, lineBytesMax)
	for {
		line, err := in.ReadSlice('\n') // a longer line is cut into several
		if line = bytes.TrimRight(line, "\r\n"); len(bytes.TrimSpace(line)) > 0 {
			t.add(string(line))
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

func (t *tail) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.lines) == tailLines {
		t.lines = slices.Delete(t.lines, 0, tailLines/4)
	}
	t.lines = append(t.lines, line)
	t.spoke = time.Now()
	t.trace = t.trace || strings.Contains(line, "Traceback (most recent call last)")
	_, _ = io.WriteString(t.out, line+"\n") // a full disk must not stop the engine
}

// silent is how long an engine that raised an exception has said nothing more; 0 for one that did not.
func (t *tail) silent() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.trace {
		return 0
	}
	return time.Since(t.spoke)
}

func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.lines) == 0 {
		return ""
	}
	return clip(t.lines[len(t.lines)-1])
}

// raised is the line of a Python traceback, or of a log, that names the exception.
var raised = regexp.MustCompile(`(?:^|\s)((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)): (.+)$`)

// why takes from the last lines what an engine died of. In a traceback that went through several processes the first
// exception is the cause and the last one says only that another process failed.
func (t *tail) why() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var causes []string
	for _, line := range t.lines {
		if m := raised.FindStringSubmatch(line); m != nil {
			if cause := clip(m[1] + ": " + m[2]); !slices.Contains(causes, cause) {
				causes = append(causes, cause)
			}
		}
	}
	if len(causes) > 0 {
		return causes[0]
	}
	var last []string
	for _, line := range t.lines[max(0, len(t.lines)-3):] {
		last = append(last, clip(strings.TrimSpace(line)))
	}
	return strings.Join(last, " | ")
}

func clip(s string) string {
	if len(s) > 300 {
		return strings.ToValidUTF8(s[:300], "") + "..."
	}
	return s
}
