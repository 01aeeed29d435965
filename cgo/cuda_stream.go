package cgo

import (
	"errors"
	"time"
)

// Stream is a queue of copies that the device works off in order, beside the engine's own streams.
type Stream struct {
	x *GPUContext
	c object
}

// NewStream makes a stream.
func (x *GPUContext) NewStream() (*Stream, error) {
	c, r := cudaStream(x.d.c, x.c)
	if err := x.counted(&gpuLive.streams, 1, r, "make a stream"); err != nil {
		return nil, err
	}
	return &Stream{x: x, c: c}, nil
}

// Close frees the stream; what it holds is worked off all the same.
func (s *Stream) Close() error {
	if s == nil || s.c == nil {
		return nil
	}
	r := cudaStreamFree(s.x.d.c, s.x.c, s.c)
	s.c = nil
	return s.x.counted(&gpuLive.streams, -1, r, "free a stream")
}

// Copy queues copies. Where it fails, those before the one that failed are under way.
func (s *Stream) Copy(kind CopyKind, copies []Copy) error {
	if len(copies) == 0 {
		return nil
	}
	done, r := cudaCopies(s.x.d.c, s.x.c, s.c, kind, copies)
	return s.x.check(r, "queue copy %d of %d", done+1, len(copies))
}

// Sync waits until everything queued is done, and gives the first error of it.
func (s *Stream) Sync() error {
	return s.x.check(cudaStreamSync(s.x.d.c, s.x.c, s.c), "wait for a stream")
}

// Wait makes what is queued from now on wait for an event.
func (s *Stream) Wait(e *Event) error {
	return s.x.check(cudaStreamWait(s.x.d.c, s.x.c, s.c, e.c), "let a stream wait")
}

// Event is a point in a stream's work.
type Event struct {
	x *GPUContext
	c object
}

// EventKind is what an event is for.
type EventKind int

// The kinds. Only those of one kind can do it.
const (
	EventOrder  EventKind = iota // waiting
	EventTiming                  // waiting, and the time between two
	EventShared                  // waiting, in other processes too
)

// NewEvent makes an event.
func (x *GPUContext) NewEvent(kind EventKind) (*Event, error) {
	c, r := cudaEvent(x.d.c, x.c, kind == EventTiming, kind == EventShared)
	if err := x.counted(&gpuLive.events, 1, r, "make an event"); err != nil {
		return nil, err
	}
	return &Event{x: x, c: c}, nil
}

// Share names an EventShared to other processes on the host.
func (e *Event) Share() (h IPCHandle, err error) {
	err = e.x.check(cudaEventIPCGet(e.x.d.c, e.x.c, e.c, &h), "share an event")
	return h, err
}

// OpenEvent takes an event that another process shared.
func (x *GPUContext) OpenEvent(h IPCHandle) (*Event, error) {
	c, r := cudaEventIPCOpen(x.d.c, x.c, &h)
	if err := x.counted(&gpuLive.events, 1, r, "open an event of another process"); err != nil {
		return nil, err
	}
	return &Event{x: x, c: c}, nil
}

// Close frees the event.
func (e *Event) Close() error {
	if e == nil || e.c == nil {
		return nil
	}
	r := cudaEventFree(e.x.d.c, e.x.c, e.c)
	e.c = nil
	return e.x.counted(&gpuLive.events, -1, r, "free an event")
}

// Record sets the event behind what a stream holds.
func (e *Event) Record(s *Stream) error {
	return e.x.check(cudaEventRecord(e.x.d.c, e.x.c, e.c, s.c), "record an event")
}

// Done says whether the stream got there.
func (e *Event) Done() (bool, error) {
	r := cudaEventQuery(e.x.d.c, e.x.c, e.c)
	if r == CUDANotReady {
		return false, nil
	}
	return r == 0, e.x.check(r, "query an event")
}

// Sync waits until the stream got there.
func (e *Event) Sync() error {
	return e.x.check(cudaEventSync(e.x.d.c, e.x.c, e.c), "wait for an event")
}

// Since is the time from another event to this one, both EventTiming and done.
func (e *Event) Since(from *Event) (time.Duration, error) {
	if from == nil {
		return 0, errors.New("time between events: there is no first one")
	}
	ms, r := cudaEventElapsed(e.x.d.c, e.x.c, from.c, e.c)
	return time.Duration(float64(ms) * float64(time.Millisecond)), e.x.check(r, "time between events")
}
