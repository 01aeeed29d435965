package trace

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	mooncakeText = `
{"timestamp": 3000, "input_length": 600, "output_length": 52, "hash_ids": [46, 47], "more": {"x": 1}}
{"timestamp": 3500.5, "input_length": 1, "output_length": 1, "hash_ids": []}
`
	azureText = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:51,3,1\r\n"
)

func read(text string) ([]Request, error) {
	r, err := NewReader(strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	return ReadAll(r)
}

func TestMooncake(t *testing.T) {
	got, err := read(mooncakeText)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].At != 0 || got[0].Prompt != 600 || got[0].Output != 52 || !slices.Equal(got[0].Blocks, []uint64{46, 47}) {
		t.Fatalf("got %+v", got)
	}
	if got[1].At != 500*time.Millisecond+500*time.Microsecond || got[1].Prompt != 1 {
		t.Fatalf("got %+v", got[1])
	}
}

func TestAzure(t *testing.T) {
	got, err := read(azureText)
	if err != nil {
		t.Fatal(err)
	}
	want := []Request{{Prompt: 374, Output: 44}, {At: 4314579 * time.Microsecond, Prompt: 396, Output: 109}, {At: 4319410 * time.Microsecond, Prompt: 3, Output: 1}}
	for i, w := range want {
		if g := got[i]; g.At != w.At || g.Prompt != w.Prompt || g.Output != w.Output || len(g.Blocks) != 0 {
			t.Errorf("request %d is %+v, want %+v", i, g, w)
		}
	}
}

func TestRefused(t *testing.T) {
	head := "TIMESTAMP,ContextTokens,GeneratedTokens\n"
	for text, says := range map[string]string{
		"":                                  "empty",
		"\n\n":                              "empty",
		"a,b\n1,2\n":                        "neither",
		head:                                "no requests",
		head + "2023-11-16 18:15:46,0,44\n": "line 2",
		head + "2023-11-16 18:15:46,1,x\n":  "GeneratedTokens",
		head + "yesterday,1,1\n":            "line 2",
		head + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n":                  "line 3: its time is before",
		`{"timestamp": "soon", "input_length": 6, "output_length": 5}`:               "timestamp",
		`{"timestamp": 1, "input_length": 1e99, "output_length": 5}`:                 "input_length",
		`{"timestamp": 1, "input_length": 6}`:                                        "line 1",
		`{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}`: "hash_ids",
		"{\"timestamp\": 1, \"input_length\": 6, \"output_length\": 1}\n{":           "line 2: no JSON",
	} {
		if _, err := read(text); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: got %v, want something about %q", text, err, says)
		}
	}
}

func TestRates(t *testing.T) {
	all, err := read(azureText)
	if err != nil {
		t.Fatal(err)
	}
	var a, b Request
	slow, fast := &Slice{Requests: all}, &Faster{Reader: &Slice{Requests: all, Rate: 2}, Rate: 2}
	for range all {
		if err := errors.Join(slow.Next(&a), fast.Next(&b)); err != nil {
			t.Fatal(err)
		}
		if d := a.At - 4*b.At; d < -8 || d > 8 || a.Prompt != b.Prompt {
			t.Errorf("%+v and four times as fast %+v", a, b)
		}
	}
	if slow.Next(&a) != io.EOF || fast.Next(&b) != io.EOF {
		t.Error("the end is not told")
	}
}

func FuzzReader(f *testing.F) {
	f.Add(mooncakeText)
	f.Add(azureText)
	f.Fuzz(func(t *testing.T, text string) {
		all, err := read(text)
		if err != nil {
			return
		}
		for i := range all {
			if i > 0 && all[i].At < all[i-1].At || all[i].Prompt < 1 || all[i].Output < 1 || all[i].At < 0 {
				t.Fatalf("request %d is %+v", i, all[i])
			}
		}
	})
}
