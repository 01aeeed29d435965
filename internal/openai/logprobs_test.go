package openai

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

func TestLogprobsGolden(t *testing.T) {
	words := append(words[:len(words):len(words)], "é")
	last := int32(256 + len(words) - 1)
	entries := []Logprob{
		{TokenLogprob: TokenLogprob{'a', 0}, Unknown: true},
		{TokenLogprob: TokenLogprob{last, -0.5}, Top: []TokenLogprob{{last, -0.5}, {256, -1e-7}}}, // é
		{TokenLogprob: TokenLogprob{259, float32(math.Inf(-1))}, Top: []TokenLogprob{{'"', -2}, {260, -3}}},
	}
	for ep, want := range map[Endpoint]string{
		Completions: `{"tokens":["a","é","bytes:\\xf0\\x9f"],"token_logprobs":[null,-0.5,-9999],` +
			`"top_logprobs":[null,{"é":-0.5,"<special>":-1e-07},{"\"":-2,"bytes:\\x98\\x80":-3,"bytes:\\xf0\\x9f":-9999}],"text_offset":[4,5,6]}`,
		Chat: `{"content":[{"token":"a","logprob":0,"bytes":[97],"top_logprobs":[]},` +
			`{"token":"é","logprob":-0.5,"bytes":[195,169],"top_logprobs":[{"token":"é","logprob":-0.5,"bytes":[195,169]},{"token":"<special>","logprob":-1e-07,"bytes":[60,115,112,101,99,105,97,108,62]}]},` +
			`{"token":"�","logprob":-9999,"bytes":[240,159],"top_logprobs":[{"token":"\"","logprob":-2,"bytes":[34]},{"token":"��","logprob":-3,"bytes":[152,128]}]}],"refusal":null}`,
	} {
		var l Logprobs
		if got := string(l.appendJSON(nil, ep)); got != "null" {
			t.Errorf("empty: %s", got)
		}
		st := &LogprobStyle{Endpoint: ep, Vocab: words, Offset: 4}
		for i := range entries {
			l.Add(st, &entries[i])
		}
		if got := string(l.appendJSON(nil, ep)); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	}
}

// TestTopNamesAreOnce: several tokens may have one name, and JSON objects want theirs once.
func TestTopNamesAreOnce(t *testing.T) {
	vocab := vocabulary{"<special>", "x", "x", "y"}
	var l Logprobs
	st := &LogprobStyle{Endpoint: Completions, Vocab: vocab}
	l.Add(st, &Logprob{TokenLogprob: TokenLogprob{258, -4}, Top: []TokenLogprob{{'x', -1}, {259, -2}, {257, -3}}})
	if got := string(l.appendJSON(nil, Completions)); !strings.Contains(got, `[{"x":-1,"y":-2}]`) {
		t.Error(got)
	}
}

// TestAssembledIsWhole: chunks of several choices in any order make the response that is rendered at once.
func TestAssembledIsWhole(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 200 {
		ep := Endpoint(i % 2)
		h := Head{Endpoint: ep, ID: "id", Model: "m"}
		a := Assembler{Endpoint: ep}
		want := Whole{Usage: Usage{3, 9, 1}}
		n := 1 + rng.IntN(3)
		styles := make([]LogprobStyle, n)
		for k := range styles {
			styles[k] = LogprobStyle{Endpoint: ep, Vocab: words}
			want.At(k)
		}
		feed := func(ev []byte) {
			if _, err := a.Add(ev[len("data: "):]); err != nil {
				t.Fatal(err)
			}
		}
		for range 20 {
			k := rng.IntN(n)
			h.Index = k
			id := int32(rng.IntN(266))
			lp := Logprob{TokenLogprob: TokenLogprob{id, -rng.Float32()}, Top: []TokenLogprob{{int32(rng.IntN(266)), -rng.Float32() * 1e-6}}}
			again := styles[k]
			var chunk Logprobs
			chunk.Add(&again, &lp)
			w := want.At(k)
			w.Logprobs.Add(&styles[k], &lp)
			w.Text = append(w.Text, "t\""...)
			w.TokenIDs = append(w.TokenIDs, id)
			feed(h.AppendText(nil, []byte("t\""), []int32{id}, &chunk))
		}
		for k := range n {
			h.Index = k
			want.At(k).Finish = "stop"
			feed(h.AppendFinish(nil, nil, "stop"))
		}
		feed(h.AppendUsage(nil, want.Usage))
		got, wanted := h.AppendWhole(nil, &a.Whole), h.AppendWhole(nil, &want)
		if string(got) != string(wanted) || !json.Valid(got) {
			t.Fatalf("got\n%s\nwant\n%s", got, wanted)
		}
	}
}

func TestParseFeatures(t *testing.T) {
	r := mustParse(t, Completions, `{"prompt":"x","n":3,"best_of":3,"logprobs":4,"echo":true,"max_tokens":0,"min_p":0.25,"presence_penalty":-2,
		"frequency_penalty":2,"repetition_penalty":1.5,"logit_bias":{"7":-100,"8":1.5,"9":null}}`)
	if r.N != 3 || !r.Logprobs || r.TopLogprobs != 4 || !r.Echo || !r.PromptOnly || r.MinP != 0.25 || r.Presence != -2 || r.Frequency != 2 ||
		r.Repetition != 1.5 || !reflect.DeepEqual(r.Bias, map[int32]float32{7: -100, 8: 1.5}) {
		t.Errorf("%+v", r)
	}
	for body, top := range map[string]int{`"logprobs":true`: 0, `"logprobs":true,"top_logprobs":9`: 9, `"top_logprobs":20,"logprobs":true`: 20, `"top_logprobs":0`: -1, `"logprobs":false`: -1} {
		r := mustParse(t, Chat, `{"messages":[{"role":"user","content":"x"}],`+body+`}`)
		if r.Logprobs != (top >= 0) || r.TopLogprobs != max(top, 0) {
			t.Errorf("%s: %v %d", body, r.Logprobs, r.TopLogprobs)
		}
	}
}
