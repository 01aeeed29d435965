package profiler

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func TestReadCountsTokens(t *testing.T) {
	for _, c := range []struct {
		name, in string
		want     told
		seen     []int
		err      string
	}{
		{"an event a token", "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n", told{tokens: 2, cached: -1}, []int{1, 2}, ""},
		{"a token without text", "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}]}\ndata: [DONE]\n", told{tokens: 1, cached: -1}, []int{1}, ""},
		{"several tokens in an event", "data: {\"choices\":[{\"text\":\"\",\"token_ids\":[1,2,3]}]}\ndata:{\"choices\":[{\"text\":\"x\",\"token_ids\":[4]}]}\ndata: [DONE]\n", told{tokens: 4, cached: -1}, []int{3, 4}, ""},
		{"as the engine counts", "data: {\"choices\":[{\"text\":\"xyz\"}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":5,\"prompt_tokens_details\":{\"cached_tokens\":0}}}\ndata: [DONE]\n", told{tokens: 5, prompt: 7, usage: true}, []int{5}, ""},
		{"no token", ": hello\ndata: {\"choices\":[]}\ndata: [DONE]\n", told{}, nil, "no token"},
		{"cut off", "data: {\"choices\":[{\"text\":\"a\"}]}\n", told{}, []int{1}, "ended early"},
		{"an error in the stream", "data: {\"error\":{\"message\":\"out of memory\"}}\n", told{}, nil, "out of memory"},
		{"no JSON", "data: x\n", told{}, nil, "read the stream"},
	} {
		var seen []int
		got, err := read(strings.NewReader(c.in), func(n int, _ time.Time) bool { seen = append(seen, n); return true })
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: %v, want %q", c.name, err, c.err)
			}
		} else if err != nil || *got != c.want {
			t.Errorf("%s: %+v, %v; want %+v", c.name, got, err, c.want)
		}
		if len(seen) != len(c.seen) || len(seen) > 0 && seen[len(seen)-1] != c.seen[len(c.seen)-1] {
			t.Errorf("%s: seen %v, want %v", c.name, seen, c.seen)
		}
	}
}

func TestPromptsAreDifferentAndCanBeCut(t *testing.T) {
	a, b := prompt(40, 1, 2, 3), prompt(40, 1, 2, 4)
	if bytes.Equal(first(a, 8), first(b, 8)) {
		t.Error("two prompts begin alike")
	}
	if !bytes.Equal(a, prompt(40, 1, 2, 3)) {
		t.Error("the same seed gives another prompt")
	}
	if got := first(a, 16); bytes.Count(got, []byte(",")) != 15 || !bytes.HasPrefix(a, got[:len(got)-1]) || got[len(got)-1] != ']' {
		t.Errorf("first 16 tokens of %s are %s", a, got)
	}
	if !bytes.Equal(first(a, 40), a) {
		t.Error("all tokens are not the whole")
	}
}

// Whatever an engine sends, tokens are only ever more, and the end is an answer or an error.
func FuzzRead(f *testing.F) {
	f.Add([]byte("data: {\"choices\":[{\"text\":\"a\",\"token_ids\":[1]}],\"usage\":{\"completion_tokens\":-3}}\n\ndata: [DONE]\n"))
	f.Add([]byte("data: {\"choices\":null,\"error\":null}\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		last := 0
		got, err := read(bytes.NewReader(in), func(n int, _ time.Time) bool {
			if n <= last {
				t.Fatalf("%d tokens after %d", n, last)
			}
			last = n
			return true
		})
		if err == nil && got.tokens < 1 {
			t.Fatal("an answer without tokens")
		}
	})
}
