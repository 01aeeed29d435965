package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/scheduler/connector"
	"github.com/headrace/headrace/scheduler/planner"
)

// Phases of an engine.
const (
	Starting = "starting" // ordered, and does not serve yet
	Ready    = "ready"
	Draining = "draining" // gets no new requests, and has some
	Stopping = "stopping" // was told to end
)

// Record is an engine that the planner knows of.
type Record struct {
	connector.Engine
	Phase string    `json:"phase"`
	Since time.Time `json:"since"` // it is in this phase
	// Failed is why it is given up, of one that never served.
	Failed string `json:"failed,omitempty"`
}

// Decided is a change, as it is shown and remembered.
type Decided struct {
	Time    time.Time        `json:"time"`
	Planner string           `json:"planner"`
	Had     planner.Pools    `json:"had"`
	Want    planner.Pools    `json:"want"`
	Reason  string           `json:"reason"`
	Figures []planner.Figure `json:"figures,omitempty"`
	Start   []string         `json:"start,omitempty"`
	Stop    []string         `json:"stop,omitempty"`
	// Chosen says why those stop and not others.
	Chosen []string `json:"chosen,omitempty"`
	// Result is "in progress", "done", "dry run", or what went wrong.
	Result string  `json:"result"`
	TookS  float64 `json:"took_s,omitempty"`
}

const inProgress = "in progress"

// State is what a planner must know to go on where it, or another one, was interrupted.
type State struct {
	Version   int             `json:"version"`
	Namespace string          `json:"namespace"`
	Model     string          `json:"model"`
	Spec      string          `json:"planner"`
	Planner   json.RawMessage `json:"planner_state,omitempty"` // its own; of another Spec it is of no use
	Epoch     time.Time       `json:"epoch"`                   // what the planner's times count from
	Saved     time.Time       `json:"saved"`
	Engines   []*Record       `json:"engines"`
	Decisions []*Decided      `json:"decisions"`            // the last ones, the latest last
	HoldUntil time.Time       `json:"hold_until,omitzero"`  // nothing is started before: a start failed
	HoldTimes int             `json:"hold_times,omitempty"` // starts that failed in a row
}

const (
	stateVersion  = 1
	decisionsKept = 20
)

// Store keeps a state over restarts.
type Store interface {
	// Load reads it; nil is none.
	Load(ctx context.Context) (*State, error)
	// Save replaces it as a whole. registry.ErrNotLeading if another planner leads now.
	Save(ctx context.Context, s *State) error
	// Clear removes it: at an orderly end.
	Clear(ctx context.Context) error
}

// errUnreadable is a state that this program can make nothing of.
var errUnreadable = errors.New("it cannot be read")

func decodeState(data []byte, from string) (*State, error) {
	var s State
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("read the planner's state %s: %w: %w", from, errUnreadable, err)
	}
	if s.Version != stateVersion {
		return nil, fmt.Errorf("read the planner's state %s: %w: it is of version %d, this program's of %d", from, errUnreadable, s.Version, stateVersion)
	}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("read the planner's state %s: %w: %w", from, errUnreadable, err)
	}
	if n := len(s.Decisions) - decisionsKept; n > 0 {
		s.Decisions = s.Decisions[n:]
	}
	return &s, nil
}

// check finds what no planner writes: a file that was edited or is damaged. With such a state nothing is begun that nobody meant.
func (s *State) check() error {
	names := map[string]bool{}
	for _, e := range s.Engines {
		switch {
		case e == nil || e.Name == "":
			return errors.New("an engine has no name")
		case names[e.Name]:
			return fmt.Errorf("there are two engines %s", e.Name)
		case !slices.Contains([]string{connector.Prefill, connector.Decode, connector.Whole}, e.Role):
			return fmt.Errorf("the engine %s has the role %q", e.Name, e.Role)
		case !slices.Contains([]string{Starting, Ready, Draining, Stopping}, e.Phase):
			return fmt.Errorf("the engine %s is %q", e.Name, e.Phase)
		}
		names[e.Name] = true
	}
	if slices.Contains(s.Decisions, nil) {
		return errors.New("a decision is missing")
	}
	if s.HoldTimes < 0 {
		return fmt.Errorf("%d starts have failed", s.HoldTimes)
	}
	return nil
}

// epochMost is how long a planner's times may count.
const epochMost = 50 * 365 * 24 * time.Hour

// mend takes back what cannot be by the clock of now, which may have been set since: times to come, and a wait longer than any that is ordered. It
// says whether the planner's own state is of no use.
func (s *State) mend(now time.Time) (anew bool) {
	if most := now.Add(holdMax); s.HoldUntil.After(most) {
		s.HoldUntil = most
	}
	if age := now.Sub(s.Epoch); age >= 0 && age < epochMost && !s.Saved.After(now) {
		return false
	}
	s.Epoch, s.Planner = now, nil
	return true
}

// File keeps a state in a file, for engines of this machine.
type File struct {
	Path string
	// Lead is checked before each Save, so that who does not lead any more begins nothing; nil: there is nobody else.
	Lead *registry.Leadership
}

// Load reads the file.
func (f *File) Load(context.Context) (*State, error) {
	data, err := os.ReadFile(f.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the planner's state: %w", err)
	}
	return decodeState(data, f.Path)
}

// Save writes a new file in the old one's place, on the disk before it is named: what it says may have been begun a moment later.
func (f *File) Save(ctx context.Context, s *State) error {
	if f.Lead != nil {
		if err := f.Lead.Check(ctx); err != nil {
			return err
		}
	}
	data, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("write the planner's state: %w", err)
	}
	tmp, err := os.OpenFile(f.Path+".tmp", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = tmp.Write(data)
		err = errors.Join(err, tmp.Sync(), tmp.Close())
	}
	if err == nil {
		err = os.Rename(tmp.Name(), f.Path)
	}
	if err != nil {
		_ = os.Remove(f.Path + ".tmp")
		return fmt.Errorf("write the planner's state: %w", err)
	}
	if d, err := os.Open(filepath.Dir(f.Path)); err == nil {
		_ = d.Sync()
		_ = d.Close()
	}
	return nil
}

// Clear removes the file.
func (f *File) Clear(context.Context) error {
	if err := os.Remove(f.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the planner's state: %w", err)
	}
	return nil
}

// Shared keeps a state in the registry, for the next leader wherever it runs.
type Shared struct{ Lead *registry.Leadership }

// Load reads it.
func (s *Shared) Load(ctx context.Context) (*State, error) {
	data, err := s.Lead.Get(ctx)
	if err != nil || data == nil {
		return nil, err
	}
	return decodeState(data, "in the registry")
}

// Save replaces it if this process still leads.
func (s *Shared) Save(ctx context.Context, st *State) error {
	data, err := json.Marshal(st)
	if err != nil {
		return fmt.Errorf("write the planner's state: %w", err)
	}
	return s.Lead.Put(ctx, data)
}

// Clear removes it.
func (s *Shared) Clear(ctx context.Context) error { return s.Lead.Put(ctx, nil) }

var (
	_ Store = (*File)(nil)
	_ Store = (*Shared)(nil)
)
