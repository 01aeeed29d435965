package socket

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

const patience = 10 * time.Second

// pair is both ends of a TCP connection, the first one made by New.
func pair(t *testing.T) (net.Conn, *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close(); _ = b.Close() })
	for _, c := range []net.Conn{a, b} {
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
	}
	return New(a), b.(*net.TCPConn)
}

func TestBytesGoBothWays(t *testing.T) {
	a, b := pair(t)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<19) // more than sockets hold
	go func() {
		_, _ = io.Copy(b, io.LimitReader(b, int64(len(sent))))
		_ = b.CloseWrite()
	}()
	wrote := make(chan error, 1)
	go func() {
		n, err := a.Write(sent)
		if err == nil && n != len(sent) {
			err = io.ErrShortWrite
		}
		wrote <- err
	}()
	got, err := io.ReadAll(a)
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("got %d bytes of %d back, %v", len(got), len(sent), err)
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}
	if n, err := a.Read(nil); n != 0 || err != nil {
		t.Errorf("reading nothing: %d, %v", n, err)
	}
	if n, err := a.Write(nil); n != 0 || err != nil {
		t.Errorf("writing nothing: %d, %v", n, err)
	}
}

func TestDeadlinesHold(t *testing.T) {
	a, b := pair(t)
	if err := a.SetDeadline(time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	var buf [8]byte
	if n, err := a.Read(buf[:]); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %d, %v", n, err)
	}
	n, err := a.Write(make([]byte, 64<<20))
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("write: %d, %v", n, err)
	}
	if err := a.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if n, err := a.Read(buf[:]); err != nil || string(buf[:n]) != "hello" {
		t.Errorf("read behind a deadline: %q, %v", buf[:n], err)
	}
}

func TestCloseWakesReaders(t *testing.T) {
	a, _ := pair(t)
	read := make(chan error, 1)
	go func() {
		_, err := a.Read(make([]byte, 8))
		read <- err
	}()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Errorf("%v", err)
	}
	if _, err := a.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("%v", err)
	}
}

func TestResetIsAnError(t *testing.T) {
	a, b := pair(t)
	if err := b.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Read(make([]byte, 8)); err == nil || err == io.EOF {
		t.Errorf("%v", err)
	}
}

func TestReadsAndWritesTakeNoMemory(t *testing.T) {
	a, b := pair(t)
	go func() { _, _ = io.Copy(b, struct{ io.Reader }{b}) }()
	buf := make([]byte, 64)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := a.Write(buf); err != nil {
			t.Error(err)
		}
		if _, err := io.ReadFull(a, buf); err != nil {
			t.Error(err)
		}
	}); n > 1 { // those of the goroutine on the other side
		t.Errorf("%.1f allocations", n)
	}
}

func TestPiecesAreWrittenInOrder(t *testing.T) {
	a, b := pair(t)
	var pieces net.Buffers
	var want []byte
	for i := range 3 * 8 { // more than one call takes, some empty, some longer than sockets hold
		p := bytes.Repeat([]byte{byte('a' + i)}, []int{0, 1, 3000, 1 << 20}[i%4])
		pieces, want = append(pieces, p), append(want, p...)
	}
	got := make(chan []byte, 1)
	go func() {
		all, _ := io.ReadAll(b)
		got <- all
	}()
	n, err := WriteBuffers(a, &pieces)
	if err != nil || int(n) != len(want) || len(pieces) != 0 {
		t.Errorf("wrote %d bytes of %d, %d pieces are left, %v", n, len(want), len(pieces), err)
	}
	_ = a.Close()
	if !bytes.Equal(<-got, want) {
		t.Error("other bytes came")
	}
}

func TestPiecesGoOnBehindADeadline(t *testing.T) {
	a, b := pair(t)
	if err := a.SetWriteDeadline(time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<20) // more than sockets hold
	pieces := net.Buffers{want[:100], want[100:]}
	n, err := WriteBuffers(a, &pieces)
	if !errors.Is(err, os.ErrDeadlineExceeded) || n >= int64(len(want)) || len(pieces) == 0 {
		t.Fatalf("wrote %d bytes of %d, %d pieces are left, %v", n, len(want), len(pieces), err)
	}
	if err := a.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	got := make(chan []byte, 1)
	go func() {
		all, _ := io.ReadAll(b)
		got <- all
	}()
	if more, err := WriteBuffers(a, &pieces); err != nil || n+more != int64(len(want)) {
		t.Fatalf("wrote %d bytes behind %d, of %d, %v", more, n, len(want), err)
	}
	_ = a.Close()
	if !bytes.Equal(<-got, want) {
		t.Error("other bytes came")
	}
}

func TestOthersAreLeftAsTheyAre(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if New(a) != a {
		t.Error("a pipe is wrapped")
	}
}
