//go:build !linux

package socket

import (
	"net"
	"runtime"
)

// New returns c.
func New(c net.Conn) net.Conn { return c }

// WriteBuffers writes all pieces in order.
func WriteBuffers(c net.Conn, pieces *net.Buffers) (int64, error) { return pieces.WriteTo(c) }

// Yield lets others run.
func Yield() { runtime.Gosched() }
