package routerbench

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/headrace/headrace/bench/front"
	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/worker/standin"
)

// BenchmarkWhole is a request to one worker and back, client and stand-in in this process: how much of the heap a request takes.
func BenchmarkWhole(b *testing.B) {
	for _, stream := range []bool{false, true} {
		b.Run(fmt.Sprintf("stream=%v", stream), func(b *testing.B) {
			text := fmt.Sprintf(`{"model":"m","stream":%v,"max_tokens":64,"messages":[{"role":"user","content":"%s"}]}`, stream, strings.Repeat("alpha ", 160))
			sent := fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
			c, _ := benchRouter(b, router.Config{}, nil)
			b.ReportAllocs()
			buf := make([]byte, 64<<10)
			for b.Loop() {
				if _, err := c.Write(sent); err != nil {
					b.Fatal(err)
				}
				if err := takeAnswer(c, buf, stream); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// benchRouter gives a connection to a router with two instant workers, which know may change before it has them, and its admin
// address.
func benchRouter(b *testing.B, cfg router.Config, know func(*pairing.Worker)) (c net.Conn, admin string) {
	ctx, cancel := context.WithCancel(b.Context())
	x := &standin.Instant{}
	ended := make(chan error, 4)
	var workers front.Fixed
	for i := range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		w := pairing.Worker{ID: fmt.Sprint("w", i), Role: pairing.RoleBoth, Model: "m", Addr: l.Addr().String(), Dialect: pairing.DialectPlain, BlockTokens: talkBlock, Blocks: 1 << 16, ContextTokens: 1 << 20, TensorParallel: 1}
		if know != nil {
			know(&w)
		}
		workers = append(workers, w)
		go func() { ended <- x.Serve(ctx, l) }()
	}
	cfg.Source, cfg.ClusterKey = workers, []byte("the key of a benchmark's cluster")
	r, err := router.New(cfg)
	if err != nil {
		b.Fatal(err)
	}
	list, err := front.Listen(2)
	if err != nil {
		b.Fatal(err)
	}
	go func() { ended <- r.Serve(list[0]) }()
	go func() { ended <- r.ServeAdmin(list[1]) }()
	if c, err = net.Dial("tcp", list[0].Addr().String()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = c.Close()
		if err := r.Shutdown(context.Background()); err != nil {
			b.Error(err)
		}
		cancel()
		for range cap(ended) {
			if err := <-ended; err != nil {
				b.Error(err)
			}
		}
	})
	return c, list[1].Addr().String()
}

// takeAnswer reads an answer to its end.
func takeAnswer(c net.Conn, buf []byte, stream bool) error {
	for n := 0; ; {
		m, err := c.Read(buf[n:])
		if n += m; err != nil {
			return err
		}
		head := bytes.Index(buf[:n], []byte("\r\n\r\n"))
		if head < 0 {
			continue
		}
		if !bytes.HasPrefix(buf, []byte("HTTP/1.1 200")) {
			return fmt.Errorf("%w: %s", io.ErrUnexpectedEOF, buf[:n])
		}
		if stream && bytes.HasSuffix(buf[:n], []byte("\r\n0\r\n\r\n")) || !stream && buf[n-1] == '}' {
			return nil
		}
	}
}
