package transporttest

import (
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/headrace/headrace/transfer"
)

// Part is where a Proxy alters a data frame.
type Part uint8

// The parts.
const (
	Header Part = iota + 1
	Payload
	Trailer
)

// Proxy passes connections on to a daemon's data address, and alters bytes of data frames on their way.
type Proxy struct {
	Addr string

	listener net.Listener
	wg       sync.WaitGroup

	mu      sync.Mutex
	target  string
	conns   map[net.Conn]struct{}
	closed  bool
	armed   []Part
	always  Part
	altered int
}

// NewProxy listens. Target and Close are the caller's to call.
func NewProxy(t testing.TB) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{Addr: l.Addr().String(), listener: l, conns: make(map[net.Conn]struct{})}
	p.wg.Go(p.accept)
	return p
}

// Target sets where connections go. Until then they are refused.
func (p *Proxy) Target(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = addr
}

// Alter has a byte of the next data frames flipped, of one frame for each part named.
func (p *Proxy) Alter(parts ...Part) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.armed = append(p.armed, parts...)
}

// AlterAll has a byte of every data frame flipped from now on.
func (p *Proxy) AlterAll(part Part) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.always = part
}

// Altered says how many frames were altered so far.
func (p *Proxy) Altered() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.altered
}

// Close ends everything and waits for it.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.listener.Close()
	p.wg.Wait()
}

// keep notes a connection, to be closed with the proxy.
func (p *Proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		c.Close()
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *Proxy) drop(c net.Conn) {
	c.Close()
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		if p.keep(c) {
			p.wg.Go(func() { p.pass(c) })
		}
	}
}

func (p *Proxy) pass(near net.Conn) {
	defer p.drop(near)
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	far, err := net.Dial("tcp", target)
	if err != nil || !p.keep(far) {
		return
	}
	defer p.drop(far)
	p.wg.Go(func() {
		_, _ = io.Copy(near, far)
		near.Close()
	})
	p.forward(far, near)
}

// The handshake's sizes: see transfer/hello.go.
const (
	proxyHello    = 200
	proxyKindAt   = 12
	proxyKindLane = 2
	proxyProof    = 32
)

// forward passes the dialling end's bytes on: the handshake, then, on a lane, data frames.
func (p *Proxy) forward(w io.Writer, r io.Reader) {
	var hello [proxyHello]byte
	if !through(w, r, hello[:], -1) || !through(w, r, make([]byte, proxyProof), -1) {
		return
	}
	if binary.LittleEndian.Uint16(hello[proxyKindAt:]) != proxyKindLane {
		_, _ = io.Copy(w, r)
		return
	}
	var header [transfer.DataHeaderSize]byte
	payload := make([]byte, transfer.PieceMax)
	for {
		if _, err := io.ReadFull(r, header[:]); err != nil {
			return
		}
		piece, err := transfer.ParseHeader(&header)
		if err != nil {
			return
		}
		part := p.next()
		flip := func(of Part, n int) int {
			if part == of {
				return n / 2
			}
			return -1
		}
		if i := flip(Header, len(header)); i >= 0 {
			header[i] ^= 1
		}
		if _, err := w.Write(header[:]); err != nil {
			return
		}
		n := int(piece.Bytes)
		if !through(w, r, payload[:n], flip(Payload, n)) || !through(w, r, make([]byte, transfer.DataTrailerSize), flip(Trailer, transfer.DataTrailerSize)) {
			return
		}
	}
}

// next says what happens to the next frame.
func (p *Proxy) next() (part Part) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if part = p.always; len(p.armed) > 0 {
		part, p.armed = p.armed[0], p.armed[1:]
	}
	if part != 0 {
		p.altered++
	}
	return part
}

// through passes len(b) bytes on, the one at flip altered.
func through(w io.Writer, r io.Reader, b []byte, flip int) bool {
	if _, err := io.ReadFull(r, b); err != nil {
		return false
	}
	if flip >= 0 {
		b[flip] ^= 1
	}
	_, err := w.Write(b)
	return err == nil
}
