package dialects

import (
	"bytes"
	"testing"
)

// FuzzOneLine: an event of one line is what nextRaw and dataOf make of it.
func FuzzOneLine(f *testing.F) {
	for _, s := range []string{"data: {}\n\n", "data: a\n\ndata: b\n\n", "data:a\n\n", "data: a\r\n\r\n", ": c\n\n", "data: \n\n", "data: a\nid: 1\n\n", "event: e\ndata: a\n\n", "\n\n", "data:  a \n\nx\n\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		raw, data := oneLine(b)
		if raw == nil {
			return
		}
		wantRaw := nextRaw(b)
		want, ok := dataOf(wantRaw)
		if !ok || !bytes.Equal(raw, wantRaw) || !bytes.Equal(data, want) {
			t.Errorf("%q: got %q and %q, want %q and %q", b, raw, data, wantRaw, want)
		}
	})
}
