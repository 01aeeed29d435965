package vllm

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
)

// eventProxy stands between a publisher of KV events and those that follow it. It can lose messages, and be cut off.
type eventProxy struct {
	addr string
	to   string
	ln   net.Listener
	wg   sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]struct{}
	off   bool
	todo  int  // messages to lose
	lost  bool // and nothing has passed since
}

func newEventProxy(t *testing.T, to string) *eventProxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &eventProxy{addr: ln.Addr().String(), to: to, ln: ln, conns: map[net.Conn]struct{}{}}
	p.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

// lose loses the next n messages.
func (p *eventProxy) lose(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.todo += n
}

// gap tells whether messages were lost or are about to be, and nobody can have noticed.
func (p *eventProxy) gap() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost || p.todo > 0
}

// cut ends what there is, and lets nobody in until mend.
func (p *eventProxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.off = true
	for c := range p.conns {
		_ = c.Close()
	}
}

func (p *eventProxy) mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.off = false
}

// hold keeps a connection to be closed by cut; false when that has come.
func (p *eventProxy) hold(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.off {
		p.conns[c] = struct{}{}
	}
	return !p.off
}

func (p *eventProxy) close(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
	_ = c.Close()
}

func (p *eventProxy) serve(in net.Conn) {
	defer p.close(in)
	if !p.hold(in) {
		return
	}
	out, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer p.close(out)
	if !p.hold(out) {
		return
	}
	p.wg.Go(func() {
		_, _ = io.Copy(out, in)
		_ = out.Close()
	})
	p.pass(in, bufio.NewReader(out))
	_ = in.Close()
}

// pass passes the publisher's greeting, commands and messages on, but for what is to be lost.
func (p *eventProxy) pass(in io.Writer, out *bufio.Reader) {
	const greeting = 64
	if _, err := io.CopyN(in, out, greeting); err != nil {
		return
	}
	for {
		message, command, err := readMessage(out)
		if err != nil {
			return
		}
		if !command && p.loses() {
			continue
		}
		if _, err := in.Write(message); err != nil {
			return
		}
	}
}

func (p *eventProxy) loses() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lost = p.todo > 0; p.lost {
		p.todo--
	}
	return p.lost
}

// readMessage reads the frames of a ZMTP message, or a command.
func readMessage(in *bufio.Reader) (raw []byte, command bool, err error) {
	const more, long, commands = 1, 2, 4
	for {
		flags, err := in.ReadByte()
		if err != nil {
			return nil, false, err
		}
		head := 1
		if flags&long != 0 {
			head = 8
		}
		at := len(raw) + 1
		raw = append(append(raw, flags), make([]byte, head)...)
		if _, err := io.ReadFull(in, raw[at:]); err != nil {
			return nil, false, err
		}
		size := uint64(raw[at])
		if head == 8 {
			size = binary.BigEndian.Uint64(raw[at:])
		}
		at = len(raw)
		raw = append(raw, make([]byte, size)...)
		if _, err := io.ReadFull(in, raw[at:]); err != nil {
			return nil, false, err
		}
		if flags&more == 0 {
			return raw, flags&commands != 0, nil
		}
	}
}
