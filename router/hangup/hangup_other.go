//go:build !linux

package hangup

import "net"

// Watcher watches nothing here.
type Watcher struct{}

// New answers ErrNotSupported.
func New() (*Watcher, error) { return nil, ErrNotSupported }

// Close does nothing.
func (*Watcher) Close() error { return nil }

// Add answers ErrNotSupported.
func (*Watcher) Add(net.Conn, func()) (func(), error) { return nil, ErrNotSupported }
