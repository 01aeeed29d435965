// Package hangup tells when the other end of a TCP connection has closed its sending side, without reading from the
// connection and without a goroutine for each: one epoll instance of its own watches them all.
package hangup

import "errors"

// ErrNotSupported says that connections of this sort, or on this system, cannot be watched so.
var ErrNotSupported = errors.New("watch a connection for its end: not supported")
