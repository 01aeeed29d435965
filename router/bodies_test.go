package router

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/headrace/headrace/router/routertest"
)

// TestBodiesBounded: bodies beyond what may be held are refused before they are read, and what has ended makes room.
func TestBodiesBounded(t *testing.T) {
	ws := pair("d1")
	goOn := make(chan struct{})
	var held atomic.Bool
	held.Store(true)
	ws[0].Fault = func(_ *routertest.Call, stage string, _ int) routertest.Action {
		if stage == routertest.StageRequest && held.Load() {
			<-goOn
		}
		return routertest.Go
	}
	h := start(t, func(c *Config) {
		c.MaxBodyBytes, c.MaxHeldBytes = 200<<10, 256<<10
		c.Upstream.SilenceTimeout, c.RecoveryTimeout = patience, patience
	}, ws...)
	big := ask{n: 2, prompt: strings.Repeat("word ", 20<<10)} // 100 KiB
	first, second := h.send(big), h.send(big)
	h.until("two to be held", func() bool { return h.r.Status().HeldBytes > 200<<10 })
	for range 3 {
		a := h.do(big)
		if a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") != "1" || !strings.Contains(a.failure, "bodies") {
			t.Errorf("got %d, Retry-After %q, %q", a.status, a.header.Get("Retry-After"), a.failure)
		}
	}
	if n := value(h.r.refusals[whyMemory]); n != 3 {
		t.Errorf("%v refusals are counted", n)
	}
	held.Store(false)
	small := ask{n: 2}
	h.do(small).wantWhole(t, small) // which is not counted
	close(goOn)
	(<-first).wantWhole(t, big)
	(<-second).wantWhole(t, big)
	h.until("the room to be free", func() bool { return h.r.Status().HeldBytes == 0 })
	h.do(big).wantWhole(t, big)
}

// TestBodiesInParts: a body counts as it comes, whole or in chunks, and not at all when its client has left.
func TestBodiesInParts(t *testing.T) {
	h := start(t, func(c *Config) { c.MaxBodyBytes, c.MaxHeldBytes = 4<<20, 5<<20 }, pair("d1")...)
	begin := func(length string) net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", h.addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n", length); err != nil {
			t.Fatal(err)
		}
		return c
	}
	announced := begin(fmt.Sprintf("Content-Length: %d", 4<<20))
	if _, err := announced.Write(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	h.until("a beginning to be held", func() bool { return h.r.Status().HeldBytes == bodyAtOnceMax })
	chunks := begin("Transfer-Encoding: chunked")
	part := fmt.Sprintf("%x\r\n%s\r\n", 512<<10, bytes.Repeat([]byte{' '}, 512<<10))
	for range 6 { // 3 MiB
		if _, err := io.WriteString(chunks, part); err != nil {
			t.Fatal(err)
		}
	}
	h.until("chunks to be held", func() bool { n := h.r.Status().HeldBytes; return n >= 4<<20 && n <= 5<<20 })
	late := begin("Transfer-Encoding: chunked")
	_, _ = io.WriteString(late, part+part+part+part)
	resp, err := http.ReadResponse(bufio.NewReader(late), nil)
	if err != nil || resp.StatusCode != http.StatusTooManyRequests {
		t.Errorf("%v, %v", resp, err)
	}
	_, _ = announced.Close(), chunks.Close()
	h.until("the room to be free", func() bool { return h.r.Status().HeldBytes == 0 })
}

// TestChunksAreCopiedFewTimes: a body in many small chunks takes room in steps.
func TestChunksAreCopiedFewTimes(t *testing.T) {
	var in bytes.Buffer
	for range 1 << 14 {
		in.WriteString("4\r\nabcd\r\n")
	}
	in.WriteString("0\r\n\r\n")
	all := in.Bytes()
	if n := testing.AllocsPerRun(1, func() {
		b, err := readChunks(bufio.NewReader(bytes.NewReader(all)), 1<<20, &held{})
		if err != nil || len(b) != 4<<14 {
			t.Fatalf("%d bytes, %v", len(b), err)
		}
	}); n > 40 {
		t.Errorf("%v allocations", n)
	}
}

func TestHeldIsChecked(t *testing.T) {
	c := Config{MaxBodyBytes: 1 << 20, MaxHeldBytes: 1 << 19}
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "max-held-bytes") {
		t.Errorf("%v", err)
	}
}
