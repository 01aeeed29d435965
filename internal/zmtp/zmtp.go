// Package zmtp speaks ZeroMQ's wire protocol, ZMTP 3.0 with the NULL mechanism (https://rfc.zeromq.org/spec/23), as far as
// publishing, subscribing and asking need it: one connection at a time, with deadlines and limits. It knows neither
// reconnecting nor queues, and nothing of what is in a message.
package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4

	greetingBytes = 64
	commandMax    = 4096
	framesMax     = 16
	frameMax      = 1 << 30 // beyond, it is no frame
	writeTimeout  = 10 * time.Second
	bodyTimeout   = 10 * time.Second // for the rest of a message that has begun
)

// ErrTooLarge says that a message was larger than allowed. It was skipped, but for the frames before the one too many.
var ErrTooLarge = errors.New("read ZMTP message: too large")

// ErrIdle says that no message began before the deadline. Reading may go on.
var ErrIdle = errors.New("read ZMTP message: none came")

// Conn is a connection whose handshake is done. One goroutine may read while others write.
type Conn struct {
	nc   net.Conn
	r    *bufio.Reader
	Peer string // socket type of the other end

	buf    []byte // of the last message
	frames [][]byte

	wmu  sync.Mutex // guards what follows, and the order of writes
	wbuf []byte
}

// Handshake makes nc a Conn of a socket type, such as SUB. The peer must be one of peers. It does not close nc.
func Handshake(nc net.Conn, socket string, timeout time.Duration, peers ...string) (*Conn, error) {
	nc.SetDeadline(time.Now().Add(timeout))
	defer nc.SetDeadline(time.Time{})
	c := &Conn{nc: nc, r: newReader(nc)}
	if err := c.greet(); err != nil {
		return nil, fmt.Errorf("greet: %w", err)
	}
	var err error
	sent := make(chan error, 1)
	go func() { sent <- c.command("READY", property(nil, "Socket-Type", socket)) }()
	if c.Peer, err = c.ready(); err != nil {
		nc.SetDeadline(time.Unix(1, 0)) // unblocks the writer
		return nil, errors.Join(err, <-sent)
	}
	if err := <-sent; err != nil {
		return nil, fmt.Errorf("shake hands: %w", err)
	}
	for _, p := range peers {
		if p == c.Peer {
			return c, nil
		}
	}
	return nil, fmt.Errorf("shake hands: the other end is a %s socket, need one of %v", c.Peer, peers)
}

func property(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

// greet exchanges greetings. Both ends write first, so that is done beside reading.
func (c *Conn) greet() error {
	var out, in [greetingBytes]byte
	out[0], out[8], out[9], out[10] = 0xff, 1, 0x7f, 3
	copy(out[12:], "NULL")
	sent := make(chan error, 1)
	go func() {
		_, err := c.nc.Write(out[:])
		sent <- err
	}()
	_, err := io.ReadFull(c.r, in[:])
	if err == nil {
		switch {
		case in[0] != 0xff || in[9]&1 == 0:
			err = errors.New("the other end does not speak ZeroMQ")
		case in[10] < 3:
			err = fmt.Errorf("the other end speaks version %d of ZMTP, need 3", in[10])
		case !bytes.Equal(bytes.TrimRight(in[12:32], "\x00"), []byte("NULL")):
			err = fmt.Errorf("the other end wants %q to be told who we are", bytes.TrimRight(in[12:32], "\x00"))
		}
	}
	if err != nil {
		_ = c.nc.SetDeadline(time.Unix(1, 0))
	}
	return errors.Join(err, <-sent)
}

// ready reads the other end's READY and returns its socket type.
func (c *Conn) ready() (string, error) {
	flags, n, err := c.header()
	if err != nil {
		return "", fmt.Errorf("shake hands: %w", err)
	}
	if flags&flagCommand == 0 || n > commandMax {
		return "", errors.New("shake hands: the other end sent something else than READY")
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(c.r, body); err != nil {
		return "", fmt.Errorf("shake hands: %w", err)
	}
	name, rest := splitCommand(body)
	if name == "ERROR" {
		return "", fmt.Errorf("shake hands: the other end says %q", rest)
	}
	if name != "READY" {
		return "", fmt.Errorf("shake hands: the other end sent %q", name)
	}
	for len(rest) > 0 {
		k := int(rest[0])
		if len(rest) < 1+k+4 {
			break
		}
		v := binary.BigEndian.Uint32(rest[1+k:])
		if uint64(v) > uint64(len(rest)-1-k-4) {
			break
		}
		value := rest[1+k+4:][:v]
		if string(bytes.ToLower(rest[1:][:k])) == "socket-type" {
			return string(value), nil
		}
		rest = rest[1+k+4+int(v):]
	}
	return "", errors.New("shake hands: the other end does not say what socket it is")
}

func splitCommand(body []byte) (string, []byte) {
	if len(body) == 0 || int(body[0]) > len(body)-1 {
		return "", nil
	}
	return string(body[1:][:body[0]]), body[1+int(body[0]):]
}

// header reads a frame's flags and length.
func (c *Conn) header() (flags byte, n uint64, err error) {
	if flags, err = c.r.ReadByte(); err != nil {
		return 0, 0, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, 0, fmt.Errorf("read ZMTP frame: flags %#x", flags)
	}
	if flags&flagLong == 0 {
		b, err := c.r.ReadByte()
		return flags, uint64(b), noEOF(err)
	}
	var b [8]byte
	if _, err := io.ReadFull(c.r, b[:]); err != nil {
		return 0, 0, noEOF(err)
	}
	if n = binary.BigEndian.Uint64(b[:]); n > frameMax {
		return 0, 0, fmt.Errorf("read ZMTP frame: %d bytes", n)
	}
	return flags, n, nil
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Read reads the next message, of at most max bytes. It waits for its begin until deadline, forever when that is zero.
// The frames are good until the next call.
func (c *Conn) Read(max int, deadline time.Time) ([][]byte, error) {
	for {
		c.nc.SetReadDeadline(deadline)
		if _, err := c.r.Peek(1); errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, ErrIdle
		} else if err != nil {
			return nil, err
		}
		c.nc.SetReadDeadline(time.Now().Add(bodyTimeout))
		flags, n, err := c.header()
		if err != nil {
			return nil, noEOF(err)
		}
		if flags&flagCommand == 0 {
			return c.message(flags, n, max)
		}
		if n > commandMax {
			return nil, fmt.Errorf("read ZMTP command: %d bytes", n)
		}
		body := make([]byte, n)
		if _, err := io.ReadFull(c.r, body); err != nil {
			return nil, noEOF(err)
		}
		frames, err := c.commanded(body)
		if frames != nil || err != nil {
			return frames, err
		}
	}
}

// commanded obeys a command. SUBSCRIBE and CANCEL, of version 3.1, are made the messages that they were before.
func (c *Conn) commanded(body []byte) ([][]byte, error) {
	name, rest := splitCommand(body)
	switch name {
	case "PING":
		if len(rest) < 2 {
			return nil, errors.New("read ZMTP command: a short PING")
		}
		return nil, c.command("PONG", rest[2:])
	case "SUBSCRIBE":
		return [][]byte{append([]byte{1}, rest...)}, nil
	case "CANCEL":
		return [][]byte{append([]byte{0}, rest...)}, nil
	}
	return nil, nil
}

// message reads the frames of a message whose first header has been read.
func (c *Conn) message(flags byte, n uint64, max int) ([][]byte, error) {
	c.buf, c.frames = c.buf[:0], c.frames[:0]
	var ends [framesMax]int
	count, tooLarge := 0, false
	for {
		switch {
		case tooLarge || count == framesMax || uint64(max-len(c.buf)) < n:
			tooLarge = true
			for left := int(n); left > 0; { // a piece at a time: the deadline is for a network that stands still
				k, err := c.r.Discard(min(left, 1<<20))
				if err != nil {
					return nil, noEOF(err)
				}
				left -= k
				c.nc.SetReadDeadline(time.Now().Add(bodyTimeout))
			}
		default:
			at := len(c.buf)
			if cap(c.buf)-at < int(n) {
				c.buf = append(make([]byte, 0, at+int(n)), c.buf...)
			}
			c.buf = c.buf[:at+int(n)]
			if _, err := io.ReadFull(c.r, c.buf[at:]); err != nil {
				return nil, noEOF(err)
			}
			ends[count] = len(c.buf)
			count++
		}
		if flags&flagMore == 0 {
			break
		}
		var err error
		if flags, n, err = c.header(); err != nil {
			return nil, noEOF(err)
		}
		if flags&flagCommand != 0 {
			return nil, errors.New("read ZMTP message: a command within")
		}
	}
	at := 0
	for _, end := range ends[:count] {
		c.frames = append(c.frames, c.buf[at:end:end])
		at = end
	}
	if tooLarge {
		return c.frames, ErrTooLarge
	}
	return c.frames, nil
}

// appendFrame appends a frame.
func appendFrame(b []byte, flags byte, body ...[]byte) []byte {
	n := 0
	for _, part := range body {
		n += len(part)
	}
	if n > 255 {
		b = binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(n))
	} else {
		b = append(b, flags, byte(n))
	}
	for _, part := range body {
		b = append(b, part...)
	}
	return b
}

// AppendMessage appends a message as it goes over the wire, for Write.
func AppendMessage(b []byte, frames ...[]byte) []byte {
	for i, f := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		b = appendFrame(b, flags, f)
	}
	return b
}

// Send sends a message.
func (c *Conn) Send(frames ...[]byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.wbuf = AppendMessage(c.wbuf[:0], frames...)
	return c.write(c.wbuf)
}

// Write sends what AppendMessage made.
func (c *Conn) Write(messages []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return c.write(messages)
}

func (c *Conn) write(b []byte) error {
	c.nc.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := c.nc.Write(b)
	return err
}

func (c *Conn) command(name string, data []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.wbuf = appendFrame(c.wbuf[:0], flagCommand, []byte{byte(len(name))}, []byte(name), data)
	_, err := c.nc.Write(c.wbuf)
	return err
}

// Subscribe asks for all messages whose first frame begins with topic.
func (c *Conn) Subscribe(topic string) error {
	return c.Send(append([]byte{1}, topic...))
}

// Close closes the connection.
func (c *Conn) Close() error { return c.nc.Close() }

func newReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, 64<<10) }
