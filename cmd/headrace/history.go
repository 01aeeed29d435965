package main

import (
	"errors"
	"time"

	"github.com/headrace/headrace/internal/tfevents"
	"github.com/headrace/headrace/scheduler/planner"
)

// history keeps what a planner saw and did in an event file of TensorBoard's. It is used by one goroutine.
type history struct {
	figures planner.History
	file    *tfevents.Writer
	epoch   float64 // seconds since 1970 at the observations' moment 0
	failed  error
}

// newHistory makes a file in a directory, which is a run for TensorBoard. name tells files there apart; one of that name is replaced.
func newHistory(dir, name string, epoch time.Time, figures planner.History) (*history, error) {
	h := &history{figures: figures, epoch: float64(epoch.UnixNano()) / 1e9}
	var err error
	h.file, err = tfevents.Create(dir, name, h.epoch)
	return h, err
}

// watch is a planner.Loop's Watch. What cannot be written is told by close: planning goes on.
func (h *history) watch(o *planner.Observation, d *planner.Decision, act *planner.Act) {
	figures := h.figures.Add(o, d, act)
	if len(figures) == 0 {
		return
	}
	scalars := make([]tfevents.Scalar, len(figures))
	for i, f := range figures {
		scalars[i] = tfevents.Scalar{Tag: f.Name, Value: f.Value}
	}
	var said []tfevents.Text
	if act != nil {
		said = append(said, tfevents.Text{Tag: "change", Said: act.Had.String() + " to " + act.Want.String() + ": " + act.Reason})
	}
	err := h.file.Add(h.epoch+o.At.Seconds(), int64(o.At.Seconds()), scalars, said)
	if h.failed == nil {
		h.failed = errors.Join(err, h.file.Flush())
	}
}

// close closes the file and says what went wrong first.
func (h *history) close() error { return errors.Join(h.failed, h.file.Close()) }
