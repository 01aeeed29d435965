package standin

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
)

// Instant answers every generating request at once with the same bytes, made beforehand: a body of 1 KB, or a stream of
// Chunks events, each in a write of its own as an engine's tokens are. It reads requests whole and looks into them only for
// whether they ask for a stream, and with how many milliseconds between its events ("pace_ms" near the beginning; else none). As
// prefill of the dialect vllm-nixl it answers with transfer parameters.
type Instant struct {
	Model  string // "m"
	Chunks int    // of a stream (64)

	once    sync.Once
	whole   []byte
	prefill []byte
	head    []byte
	chunks  [][]byte
	small   map[string][]byte
	hits    atomic.Int64

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

const (
	instantBodyMax   = 64 << 20
	instantReadBytes = 16 << 10
	instantPad       = 780 // of the text: a body of about 1 KB
)

func answer(contentType, body string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", contentType, len(body), body)
}

func (x *Instant) prepare() {
	if x.Model == "" {
		x.Model = "m"
	}
	if x.Chunks == 0 {
		x.Chunks = 64
	}
	x.conns = map[net.Conn]struct{}{}
	body := func(extra string) string {
		return fmt.Sprintf(`{"id":"c1","object":"chat.completion","created":1,"model":%q,"choices":[{"index":0,"message":{"role":"assistant","content":"%s"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}%s}`, x.Model, strings.Repeat("x", instantPad), extra)
	}
	x.whole = answer("application/json", body(""))
	x.prefill = answer("application/json", body(`,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1,"tp_size":1}`))
	x.head = []byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
	for i := range x.Chunks {
		ev := fmt.Sprintf("data: {\"id\":\"c1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":%q,\"choices\":[{\"index\":0,\"delta\":{\"content\":\"tok%03d\"},\"finish_reason\":null}]}\n\n", x.Model, i)
		x.chunks = append(x.chunks, fmt.Appendf(nil, "%x\r\n%s\r\n", len(ev), ev))
	}
	x.chunks[0] = append(bytes.Clone(x.head), x.chunks[0]...)
	const done = "data: [DONE]\n\n"
	x.chunks = append(x.chunks, fmt.Appendf(nil, "%x\r\n%s\r\n0\r\n\r\n", len(done), done))
	x.small = map[string][]byte{
		"/v1/models":      answer("application/json", fmt.Sprintf(`{"object":"list","data":[{"id":%q,"object":"model","created":1,"owned_by":"stand-in"}]}`, x.Model)),
		"/get_model_info": answer("application/json", `{"is_generation":true}`), "/model_info": answer("application/json", `{"is_generation":true}`),
		"/get_server_info": answer("application/json", `{"dp_size":1,"version":"stand-in"}`), "/server_info": answer("application/json", `{"dp_size":1,"version":"stand-in"}`),
		"/health": answer("text/plain", ""), "/metrics": answer("text/plain", ""),
		"": answer("application/json", "{}"),
	}
}

// Serve serves on a listener until it is closed, or ctx ends. It may be called for several.
func (x *Instant) Serve(ctx context.Context, l net.Listener) error {
	x.once.Do(x.prepare)
	var running sync.WaitGroup
	defer running.Wait()
	defer context.AfterFunc(ctx, func() {
		_ = l.Close()
		x.mu.Lock()
		defer x.mu.Unlock()
		for c := range x.conns {
			_ = c.Close()
		}
	})()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		x.mu.Lock()
		x.conns[c] = struct{}{}
		x.mu.Unlock()
		if ctx.Err() != nil { // it came while the others were closed
			_ = c.Close()
		}
		running.Go(func() {
			_ = x.serve(c)
			_ = c.Close()
			x.mu.Lock()
			delete(x.conns, c)
			x.mu.Unlock()
		})
	}
}

// Hits is how many generating requests were answered.
func (x *Instant) Hits() int64 { return x.hits.Load() }

func (x *Instant) serve(c net.Conn) error {
	in := bufio.NewReaderSize(c, instantReadBytes)
	var req fasthttp.Request
	for {
		if err := req.ReadLimitBody(in, instantBodyMax); err != nil {
			return err
		}
		if req.MayContinue() {
			if _, err := io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
				return err
			}
			if err := req.ContinueReadBody(in, instantBodyMax); err != nil {
				return err
			}
		}
		if err := x.answer(c, &req); err != nil || req.Header.ConnectionClose() {
			return err
		}
	}
}

func (x *Instant) answer(c net.Conn, req *fasthttp.Request) error {
	path := req.URI().Path()
	if !req.Header.IsPost() || !bytes.HasPrefix(path, []byte("/v1/")) && string(path) != "/generate" {
		b := x.small[string(path)]
		if b == nil {
			b = x.small[""]
		}
		_, err := c.Write(b)
		return err
	}
	x.hits.Add(1)
	if !streams(req.Body()) {
		b := x.whole
		if bytes.Contains(tail(req.Body()), []byte(`"do_remote_decode":true`)) {
			b = x.prefill
		}
		_, err := c.Write(b)
		return err
	}
	pace, began := paceOf(req.Body()), time.Now()
	for i, chunk := range x.chunks {
		if pace > 0 && 0 < i && i < x.Chunks {
			time.Sleep(time.Until(began.Add(time.Duration(i) * pace)))
		}
		if _, err := c.Write(chunk); err != nil {
			return err
		}
	}
	return nil
}

const lookBytes = 256

func tail(b []byte) []byte { return b[max(0, len(b)-1024):] }

// paceDigits bounds a stream's pace, at a second less one millisecond.
const paceDigits = 3

// paceOf is the time that a body asks for between a stream's events; 0 for none.
func paceOf(b []byte) time.Duration {
	_, rest, _ := bytes.Cut(b[:min(lookBytes, len(b))], []byte(`"pace_ms":`))
	n := 0
	for _, c := range rest[:min(paceDigits, len(rest))] {
		if c < '0' || c > '9' {
			break
		}
		n = 10*n + int(c-'0')
	}
	return time.Duration(n) * time.Millisecond
}

// streams tells whether a body asks for a stream. It is said near one of its ends, mostly.
func streams(b []byte) bool {
	head := b[:min(lookBytes, len(b))]
	yes, no := []byte(`"stream":true`), []byte(`"stream":false`)
	switch {
	case bytes.Contains(head, yes):
		return true
	case bytes.Contains(head, no):
		return false
	case bytes.Contains(tail(b), no):
		return false
	}
	return bytes.Contains(b, yes)
}
