package openaitest

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/headrace/headrace/internal/openai"
)

func TestScanner(t *testing.T) {
	var b []byte
	h := openai.Head{Endpoint: openai.Chat, ID: "chatcmpl-1", Created: 5, Model: "m"}
	b = openai.AppendComment(b, "phase", "queued")
	b = h.AppendRole(b, nil)
	b = openai.AppendTokenComment(b, "t", []int32{12, 13})
	b = h.AppendText(b, []byte("hi: t 5\n\n\"choices\":[]"), nil, nil)
	b = openai.AppendComment(b, "hb", "")
	b = append(b, ": something new\n\n"...)
	b = openai.AppendTokenComment(b, "prior", nil)
	b = openai.AppendComment(b, "failed", "a\nb")
	b = h.AppendFinish(b, nil, openai.FinishStop)
	b = h.AppendUsage(b, openai.Usage{Prompt: 3, Completion: 2, Cached: 1})
	b = openai.AppendComment(b, "final", "")
	b = append(b, openai.Done...)
	want := []openai.EventKind{openai.EventPhase, openai.EventData, openai.EventTokens, openai.EventData, openai.EventHeartbeat, openai.EventComment, openai.EventPrior, openai.EventFailed, openai.EventData, openai.EventData, openai.EventFinal, openai.EventDone}
	for name, r := range map[string]io.Reader{
		"whole": strings.NewReader(string(b)), "bytes": iotest.OneByteReader(strings.NewReader(string(b))), "half": iotest.HalfReader(strings.NewReader(string(b))),
	} {
		t.Run(name, func(t *testing.T) {
			var kinds []openai.EventKind
			var raw []byte
			var a openai.Assembler
			s := NewScanner(r, nil)
			for {
				ev, err := s.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				kinds, raw = append(kinds, ev.Kind), append(raw, ev.Raw...)
				switch ev.Kind {
				case openai.EventTokens:
					if ids, err := openai.AppendTokens(nil, ev.Arg); err != nil || !slices.Equal(ids, []int32{12, 13}) {
						t.Errorf("tokens %v %v", ids, err)
					}
				case openai.EventFailed:
					if string(ev.Arg) != "a b" {
						t.Errorf("reason %q", ev.Arg)
					}
				case openai.EventData:
					c, err := a.Add(ev.Arg)
					if err != nil {
						t.Fatal(err)
					}
					if openai.IsUsage(ev.Arg) != (c.Usage != nil) {
						t.Errorf("openai.IsUsage of %s", ev.Arg)
					}
				}
			}
			if !slices.Equal(kinds, want) || string(raw) != string(b) {
				t.Errorf("kinds %v, want %v", kinds, want)
			}
			if w := a.Whole; string(w.Choices[0].Text) != "hi: t 5\n\n\"choices\":[]" || w.Choices[0].Finish != "stop" || w.Usage != (openai.Usage{Prompt: 3, Completion: 2, Cached: 1}) {
				t.Errorf("assembled %+v", w)
			}
		})
	}
}

func TestScannerErrors(t *testing.T) {
	for in, want := range map[string]error{
		"data: x\n":                       io.ErrUnexpectedEOF,
		"data: x":                         io.ErrUnexpectedEOF,
		"data: x\ndata: y\n\n":            openai.ErrMalformedEvent,
		"event: x\n\n":                    openai.ErrMalformedEvent,
		"\n\n\n":                          io.EOF,
		"":                                io.EOF,
		strings.Repeat("x", 9<<20):        openai.ErrEventTooLarge,
		": hb\n\n" + ": t 1\n\n" + "HTTP": io.ErrUnexpectedEOF,
	} {
		s := NewScanner(strings.NewReader(in), nil)
		var err error
		for err == nil {
			_, err = s.Next()
		}
		if !errors.Is(err, want) {
			t.Errorf("%.20q: %v, want %v", in, err, want)
		}
	}
	for _, arg := range []string{"1,", ",1", "x", "-1", "1,,2", "99999999999"} {
		if _, err := openai.AppendTokens(nil, []byte(arg)); err == nil {
			t.Errorf("token list %q was taken", arg)
		}
	}
}

func FuzzScanner(f *testing.F) {
	f.Add([]byte(": t 1,2\n\ndata: {}\n\n: hb\n\n"))
	f.Add([]byte("\n\n: failed x\r\n\n\ndata: [DONE]\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		read := func(r io.Reader) (kinds []openai.EventKind, raw string, last error) {
			s := NewScanner(r, make([]byte, 0, 16))
			for {
				ev, err := s.Next()
				if err != nil {
					return kinds, raw, err
				}
				if ev.Kind == openai.EventTokens || ev.Kind == openai.EventPrior {
					_, _ = openai.AppendTokens(nil, ev.Arg)
				}
				kinds, raw = append(kinds, ev.Kind), raw+string(ev.Raw)
			}
		}
		k1, r1, e1 := read(strings.NewReader(string(b)))
		k2, r2, e2 := read(iotest.OneByteReader(strings.NewReader(string(b))))
		if !slices.Equal(k1, k2) || r1 != r2 || fmt.Sprint(e1 == io.EOF) != fmt.Sprint(e2 == io.EOF) {
			t.Fatalf("chunking changes the events: %v %v %v, %v %v %v", k1, r1, e1, k2, r2, e2)
		}
	})
}
