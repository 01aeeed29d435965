package sidecar

import (
	"errors"

	"github.com/headrace/headrace/internal/registry"
)

// Listing is the Lister of a registry.
type Listing struct {
	Registry *registry.Registry
	kept     *registry.Announcement
}

var _ Lister = (*Listing)(nil)

// List puts the entry, or replaces it.
func (l *Listing) List(w registry.Worker) (err error) {
	if l.kept != nil {
		if err = l.kept.Update(w); !errors.Is(err, registry.ErrClosed) {
			return err
		}
	}
	l.kept, err = l.Registry.Keep(registry.KindWorker, w.ID, w)
	return err
}

// Unlist takes it out.
func (l *Listing) Unlist() error {
	if l.kept == nil {
		return nil
	}
	kept := l.kept
	l.kept = nil
	return kept.Close()
}
