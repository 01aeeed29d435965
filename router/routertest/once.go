package routertest

import "sync/atomic"

// Once is a thing that happens once.
type Once struct{ taken atomic.Bool }

// Take tells whether it happens now.
func (o *Once) Take() bool { return o.taken.CompareAndSwap(false, true) }

// Taken tells whether it has happened.
func (o *Once) Taken() bool { return o.taken.Load() }
