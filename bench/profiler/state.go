package profiler

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/headrace/headrace/scheduler/profile"
)

// The files of a profile's folder. State has a JSON object a line: the set-up, then engines and points as they come. Each is on disk before
// the next one is measured.
const (
	stateFile   = "points.jsonl"
	tableFile   = "table.json"
	reportFile  = "profile.json"
	htmlFile    = "report.html"
	svgFile     = "report.svg"
	enginesFile = "engines.log"
)

// Setup is what must not change between runs that share their points.
type Setup struct {
	Version int       `json:"version"`
	Engine  string    `json:"engine"` // what is started, or the URL
	Degrees []int     `json:"degrees"`
	Prompts []int     `json:"prompts"`
	Cached  []float64 `json:"cached"`
	Context []int     `json:"contexts"`
	Usages  []float64 `json:"kv_usages"`
	Rounds  int       `json:"rounds"`
	Tokens  int       `json:"tokens"`
	KV      int64     `json:"kv_tokens"`
	Streams int       `json:"streams"`
}

// differs says what is not as it was, "" for nothing.
func (s *Setup) differs(was *Setup) string {
	for _, x := range []struct {
		name     string
		was, now any
	}{
		{"the format", was.Version, s.Version}, {"the engine", was.Engine, s.Engine}, {"--tp", was.Degrees, s.Degrees}, {"--prompts", was.Prompts, s.Prompts},
		{"--cached", was.Cached, s.Cached}, {"--contexts", was.Context, s.Context}, {"--kv-usage", was.Usages, s.Usages}, {"--rounds", was.Rounds, s.Rounds},
		{"--timed-tokens", was.Tokens, s.Tokens}, {"--kv-tokens", was.KV, s.KV}, {"--streams", was.Streams, s.Streams},
	} {
		a, b := fmt.Sprint(x.was), fmt.Sprint(x.now)
		if a != b {
			return fmt.Sprintf("%s was %s and is %s", x.name, a, b)
		}
	}
	return ""
}

// line is one of the state's; one field is set.
type line struct {
	Setup  *Setup          `json:"setup,omitempty"`
	Engine *profile.Engine `json:"engine,omitempty"`
	Point  *profile.Point  `json:"point,omitempty"`
}

// state is what was measured so far. It is used by one goroutine.
type state struct {
	dir     string
	file    *os.File
	resumed int // points that were there
	engines []profile.Engine
	points  []profile.Point
	known   map[string]bool
}

// openState makes the folder, or goes on with what is there when it is of the same set-up. anew throws it away.
func openState(dir string, setup *Setup, anew bool) (_ *state, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make folder for the profile: %w", err)
	}
	path := filepath.Join(dir, stateFile)
	s := &state{dir: dir, known: map[string]bool{}}
	if s.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return nil, fmt.Errorf("open the profile's state: %w", err)
	}
	defer func() {
		if err != nil {
			_ = s.file.Close()
		}
	}()
	if err := syscall.Flock(int(s.file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, fmt.Errorf("%s is in use by another `headrace profile`: wait for it, or use another --out", path)
	}
	if anew {
		if err := s.file.Truncate(0); err != nil {
			return nil, fmt.Errorf("begin the profile anew: %w", err)
		}
		for _, name := range []string{tableFile, reportFile, htmlFile, svgFile} { // they are of what is no more
			if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("begin the profile anew: %w", err)
			}
		}
	}
	was, err := s.load(path)
	if err != nil {
		return nil, err
	}
	if was == nil {
		return s, s.write(line{Setup: setup})
	}
	if what := setup.differs(was); what != "" {
		return nil, fmt.Errorf("%s has %d points of another set-up: %s; use --restart to begin anew, or another --out", dir, len(s.points), what)
	}
	s.resumed = len(s.points)
	return s, nil
}

// load reads whole lines; what a killed run left of one is cut off.
func (s *state) load(path string) (was *Setup, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the profile's state: %w", err)
	}
	whole := bytes.LastIndexByte(data, '\n') + 1
	if err := s.file.Truncate(int64(whole)); err != nil {
		return nil, fmt.Errorf("mend the profile's state: %w", err)
	}
	if _, err := s.file.Seek(int64(whole), 0); err != nil {
		return nil, fmt.Errorf("mend the profile's state: %w", err)
	}
	for i, text := range bytes.Split(bytes.TrimSuffix(data[:whole], []byte("\n")), []byte("\n")) {
		if whole == 0 {
			break
		}
		var l line
		if err := json.Unmarshal(text, &l); err != nil || (l.Setup != nil) != (i == 0) {
			return nil, fmt.Errorf("%s line %d is none of a profile's; use --restart to begin anew, or another --out", path, i+1)
		}
		switch {
		case l.Setup != nil:
			was = l.Setup
		case l.Engine != nil:
			s.setEngine(l.Engine)
		case l.Point != nil && !s.known[l.Point.Key()]:
			s.points = append(s.points, *l.Point)
			s.known[l.Point.Key()] = true
		}
	}
	return was, nil
}

func (s *state) setEngine(e *profile.Engine) {
	i := slices.IndexFunc(s.engines, func(o profile.Engine) bool { return o.Degree == e.Degree })
	if i < 0 {
		s.engines = append(s.engines, *e)
		return
	}
	s.engines[i] = *e
}

// engine is what was known of a degree; nil for nothing.
func (s *state) engine(degree int) *profile.Engine {
	for i := range s.engines {
		if s.engines[i].Degree == degree {
			return &s.engines[i]
		}
	}
	return nil
}

func (s *state) addEngine(e *profile.Engine) error {
	s.setEngine(e)
	return s.write(line{Engine: e})
}

func (s *state) addPoint(p *profile.Point) error {
	s.points = append(s.points, *p)
	s.known[p.Key()] = true
	return s.write(line{Point: p})
}

// write is done when the line is on disk.
func (s *state) write(l line) error {
	b, err := json.Marshal(l)
	if err == nil {
		_, err = s.file.Write(append(b, '\n'))
	}
	if err == nil {
		err = s.file.Sync()
	}
	if err != nil {
		return fmt.Errorf("write the profile's state: %w", err)
	}
	return nil
}

func (s *state) close() error { return s.file.Close() }
