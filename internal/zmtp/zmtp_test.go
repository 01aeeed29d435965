package zmtp

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// pair is two ends of a connection.
func pair(t *testing.T, a, b string) (*Conn, *Conn) {
	t.Helper()
	x, y := net.Pipe()
	t.Cleanup(func() { x.Close(); y.Close() })
	type result struct {
		c   *Conn
		err error
	}
	done := make(chan result, 1)
	go func() {
		c, err := Handshake(y, b, time.Second, a)
		done <- result{c, err}
	}()
	c, err := Handshake(x, a, time.Second, b)
	r := <-done
	if err := errors.Join(err, r.err); err != nil {
		t.Fatal(err)
	}
	return c, r.c
}

func TestMessages(t *testing.T) {
	sub, pub := pair(t, "SUB", "PUB")
	long := bytes.Repeat([]byte("x"), 100_000)
	go func() {
		_ = pub.Send([]byte("topic"), nil, long)
		_ = pub.command("PING", []byte{0, 0, 'c'})
		_ = pub.Send([]byte("next"))
		_ = pub.Send([]byte("kept"), long)
		_ = pub.Send([]byte("last"))
	}()
	pong := make(chan string, 1)
	go func() {
		flags, n, err := pub.header()
		body := make([]byte, n)
		_, _ = io.ReadFull(pub.r, body)
		if flags == flagCommand && err == nil {
			pong <- string(body)
		}
	}()
	f, err := sub.Read(1<<20, time.Time{})
	if err != nil || len(f) != 3 || string(f[0]) != "topic" || len(f[1]) != 0 || !bytes.Equal(f[2], long) {
		t.Fatalf("%d frames, %v", len(f), err)
	}
	if f, err = sub.Read(1<<20, time.Time{}); err != nil || len(f) != 1 || string(f[0]) != "next" {
		t.Fatalf("%q, %v", f, err)
	}
	if p := <-pong; p != "\x04PONGc" {
		t.Errorf("PING was answered with %q", p)
	}
	if f, err = sub.Read(1000, time.Time{}); !errors.Is(err, ErrTooLarge) || len(f) != 1 || string(f[0]) != "kept" {
		t.Errorf("%q, %v", f, err)
	}
	if f, err = sub.Read(1000, time.Time{}); err != nil || string(f[0]) != "last" {
		t.Errorf("behind one too large: %q, %v", f, err)
	}
}

func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sub, pub := pair(t, "SUB", "PUB")
		began := time.Now()
		if _, err := sub.Read(100, began.Add(time.Minute)); !errors.Is(err, ErrIdle) || time.Since(began) != time.Minute {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		go func() { _ = pub.Send([]byte("still there")) }()
		if f, err := sub.Read(100, time.Time{}); err != nil || string(f[0]) != "still there" {
			t.Errorf("%q, %v", f, err)
		}
		go func() { _, _ = pub.nc.Write([]byte{flagMore, 10, 'h', 'a'}) }()
		began = time.Now()
		if _, err := sub.Read(100, time.Time{}); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != bodyTimeout {
			t.Errorf("half a message: after %v: %v", time.Since(began), err)
		}
	})
}

// The bytes are the RFC's and libzmq's.
func TestGoldenBytes(t *testing.T) {
	x, y := net.Pipe()
	defer x.Close()
	go func() { _, _ = Handshake(x, "SUB", time.Second, "PUB"); x.Close() }()
	var greeting [greetingBytes]byte
	if _, err := io.ReadFull(y, greeting[:]); err != nil {
		t.Fatal(err)
	}
	want := "ff00000000000000017f" + "0300" + "4e554c4c" + strings.Repeat("00", 16) + "00" + strings.Repeat("00", 31)
	if got := hex.EncodeToString(greeting[:]); got != want {
		t.Errorf("greets with %s", got)
	}
	_, _ = y.Write(greeting[:])
	ready := make([]byte, 27)
	if _, err := io.ReadFull(y, ready); err != nil {
		t.Fatal(err)
	}
	if got, want := string(ready), "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"; got[:len(want)] != want {
		t.Errorf("%q, want %q", got, want)
	}
	y.Close()
}

func TestOthersAreRefused(t *testing.T) {
	greeting := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0, 'N', 'U', 'L', 'L'}, make([]byte, 48)...)
	with := func(change func(b []byte), behind string) []byte {
		b := append([]byte(nil), greeting...)
		change(b)
		return append(b, behind...)
	}
	for want, bytes := range map[string][]byte{
		"does not speak ZeroMQ":  append([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), make([]byte, 64)...),
		"version 1":              with(func(b []byte) { b[10] = 1 }, ""),
		"CURVE":                  with(func(b []byte) { copy(b[12:], "CURVE") }, ""),
		"is a PULL socket":       with(func([]byte) {}, "\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL"),
		"something else":         with(func([]byte) {}, "\x00\x05hello"),
		"does not say what":      with(func([]byte) {}, "\x04\x06\x05READY"),
		"says \"\\x05sorry\"":    with(func([]byte) {}, "\x04\x0c\x05ERROR\x05sorry"),
		"timeout":                with(func([]byte) {}, "\x04\x20\x05READY"),
		"flags 0x80":             with(func([]byte) {}, "\x80\x20\x05READY"),
		"1152921504606846976 by": with(func([]byte) {}, "\x06\x10\x00\x00\x00\x00\x00\x00\x00\x05READY"),
	} {
		t.Run(want, func(t *testing.T) {
			x, y := net.Pipe()
			defer x.Close()
			go func() { _, _ = io.Copy(io.Discard, y) }()
			go func() { _, _ = y.Write(bytes) }()
			if c, err := Handshake(x, "SUB", time.Second, "PUB"); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%+v, %v", c, err)
			}
		})
	}
}

// FuzzRead holds that no bytes make reading panic, or take more memory than allowed.
func FuzzRead(f *testing.F) {
	f.Add(AppendMessage(nil, []byte("topic"), make([]byte, 8), bytes.Repeat([]byte("x"), 300)))
	f.Add(appendFrame(nil, flagCommand, []byte("\x04PING"), []byte{0, 0, 1}))
	f.Add(appendFrame(nil, flagCommand, []byte("\x09SUBSCRIBEtopic")))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, y := net.Pipe()
		defer x.Close()
		go func() {
			go func() { _, _ = io.Copy(io.Discard, y) }()
			_, _ = y.Write(b)
			y.Close()
		}()
		c := &Conn{nc: x, r: newReader(x)}
		for range 1000 {
			frames, err := c.Read(4096, time.Time{})
			n := 0
			for _, f := range frames {
				n += len(f)
			}
			if n > 4096 || len(frames) > framesMax {
				t.Fatalf("%d frames of %d bytes", len(frames), n)
			}
			if err != nil && !errors.Is(err, ErrTooLarge) {
				return
			}
		}
	})
}
