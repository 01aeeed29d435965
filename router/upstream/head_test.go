package upstream

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
)

// FuzzHead holds that a header which is taken says to net/http what it says here: where two readers differ about an answer's end,
// one of them takes the rest for the next answer.
func FuzzHead(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n",
		"HTTP/1.1 200\r\ncontent-length: 17\r\nConnection: close\r\n",
		"HTTP/1.0 503 Busy\r\nRetry-After: 9\r\nConnection: keep-alive\r\nContent-Length: 0\r\n",
		"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n",
		"HTTP/1.1 204 \r\nContent-Length: 5\r\n", "HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n", "HTTP/1.1 100 Continue\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 4\r\n", "HTTP/1.1 200 OK\r\nContent-Length:\t4 \r\n", "HTTP/1.1 200 OK\r\n Content-Length: 4\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, head []byte) {
		if bytes.Contains(head, []byte("\r\n\r\n")) || !bytes.HasSuffix(head, []byte("\r\n")) {
			return // bufferHeader gives no such thing
		}
		r := &response{}
		if r.parse(head) != nil {
			return
		}
		if r.status < 100 || r.status > 999 || r.left < -1 || r.retryAfter < 0 || r.retryAfter > retryAfterMax {
			t.Fatalf("%q: %+v", head, r)
		}
		std, err := http.ReadResponse(bufio.NewReader(io.MultiReader(bytes.NewReader(head), strings.NewReader("\r\n"))), nil)
		if err != nil {
			return // it minds more letters
		}
		chunked := len(std.TransferEncoding) > 0
		if std.StatusCode != r.status {
			t.Errorf("%q: status %d, to net/http %d", head, r.status, std.StatusCode)
		}
		switch {
		case r.status < http.StatusOK:
			return // it has no body, and is read over
		case r.status == http.StatusNoContent || r.status == http.StatusNotModified:
			if r.left != 0 || r.chunked {
				t.Errorf("%q: an answer without a body has %d bytes, chunked %v", head, r.left, r.chunked)
			}
			return
		}
		old := !std.ProtoAtLeast(1, 1) // a coding there is no framing to net/http, which then reads to the end
		if !old && r.chunked != chunked || !chunked && !r.chunked && r.left != std.ContentLength {
			t.Errorf("%q: chunked %v, %d bytes; to net/http %v, %d", head, r.chunked, r.left, chunked, std.ContentLength)
		}
		if r.keepAlive && (std.Close || r.chunked != chunked) {
			t.Errorf("%q: kept for another request, by net/http not", head)
		}
	})
}

// FuzzRequestHead holds that nothing in a request's values makes another line of its header, or ends it.
func FuzzRequestHead(f *testing.F) {
	f.Add("abc", "00-1-2-01", "text/event-stream", 7, false)
	f.Add("a\r\nX: y", "\n\n", "a\r\n\r\nGET / HTTP/1.1\r\n\r\n", 0, true)
	f.Fuzz(func(t *testing.T, id, value, accept string, n int, get bool) {
		n = max(n, 0)
		q := &Request{Path: "/v1/completions", RequestID: id, Accept: accept, Headers: [][2]string{{"traceparent", value}, {"tracestate", value}}, Get: get}
		b := string(q.appendHeader(nil, "h:1", n))
		head, ok := strings.CutSuffix(b, "\r\n\r\n")
		lines := strings.Split(head, "\r\n")
		want := 6 // request line, Host, User-Agent, Accept and the two
		if !get {
			want += 3
		}
		if !ok || len(lines) != want || strings.ContainsAny(strings.Join(lines, ""), "\r\n") {
			t.Fatalf("%d lines, want %d: %q", len(lines), want, b)
		}
		std, err := http.ReadRequest(bufio.NewReader(strings.NewReader(b)))
		if err != nil {
			return // letters that no header may have
		}
		if std.Host != "h:1" || std.URL.Path != q.Path || len(std.TransferEncoding) > 0 || !get && std.ContentLength != int64(n) || get && std.ContentLength > 0 {
			t.Errorf("%q: %+v", b, std)
		}
	})
}
