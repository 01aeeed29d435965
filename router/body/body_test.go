package body

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		name, in                  string
		param, message            string // of the refusal
		model, seed               string
		stream, usage, notInteger bool
	}{
		{name: "plain", in: `{"model":"m","messages":[]}`, model: "m"},
		{name: "all", in: ` { "stream" : true , "model":"m","seed":18446744073709551615,"stream_options":{"include_usage":true}} `, model: "m", stream: true, usage: true, seed: "18446744073709551615"},
		{name: "nulls", in: `{"model":"m","stream":null,"seed":null,"stream_options":null}`, model: "m"},
		{name: "inner keys are not ours", in: `{"model":"m","x":{"stream":true,"kv_transfer_params":1}}`, model: "m"},
		{name: "escaped model", in: `{"model":"\u006d\n"}`, model: "m\n"},
		{name: "seed is no integer", in: `{"model":"m","seed":1.5}`, model: "m", seed: "1.5", notInteger: true},
		{name: "negative seed", in: `{"model":"m","seed":-1}`, model: "m", seed: "-1"},
		{name: "n twice", in: `{"model":"m","n":2,"n":1}`, param: "n", message: "twice"},
		{name: "no model", in: `{}`, param: "model", message: "must provide"},
		{name: "model is a number", in: `{"model":1}`, param: "model", message: "string"},
		{name: "stream is a string", in: `{"model":"m","stream":"true"}`, param: "stream", message: "true or false"},
		{name: "stream twice", in: `{"model":"m","stream":true,"stream":false}`, param: "stream", message: "twice"},
		{name: "stream twice, once escaped", in: `{"model":"m","stream":true,"\u0073tream":false}`, param: "stream", message: "twice"},
		{name: "options without stream", in: `{"model":"m","stream_options":{"include_usage":true}}`, param: "stream_options", message: "only allowed"},
		{name: "options of a wrong kind", in: `{"model":"m","stream":true,"stream_options":[1]}`, param: "stream_options", message: "object"},
		{name: "the client's own transfer parameters", in: `{"model":"m","kv_transfer_params":{}}`, param: "kv_transfer_params", message: "clients"},
		{name: "the same, escaped", in: `{"model":"m","kv_transfer_param\u0073":{}}`, param: "kv_transfer_params", message: "clients"},
		{name: "empty", in: ``, message: "not valid JSON"},
		{name: "array", in: `[]`, message: "not a JSON object"},
		{name: "two values", in: `{"model":"m"}{}`, message: "not valid JSON"},
		{name: "cut", in: `{"model":"m"`, message: "not valid JSON"},
		{name: "deep", in: `{"model":"m","x":` + strings.Repeat("[", 1<<20) + `}`, message: "nested deeper"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := Parse([]byte(tt.in))
			if tt.message != "" {
				if err == nil || err.Status != 400 || err.Param != tt.param || !strings.Contains(err.Message, tt.message) {
					t.Fatalf("Parse = %+v, want a 400 about %q with %q", err, tt.param, tt.message)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if p.Model != tt.model || p.Stream != tt.stream || p.IncludeUsage != tt.usage || p.Seed != tt.seed {
				t.Errorf("Parse = %+v", p)
			}
			if got := p.IntegerSeed(); got != (tt.seed != "" && !tt.notInteger) {
				t.Errorf("IntegerSeed = %v", got)
			}
		})
	}
}

func TestStreaming(t *testing.T) {
	for in, want := range map[string]string{
		`{"model":"m"}`: `{"model":"m","stream":true,"stream_options":{"include_usage":true},"seed":7,`,
		` {"model" : "m" , "seed" : 9007199254740993 , "stream" : false , "user":"a" } `: ` {"model" : "m" , "seed" : 9007199254740993 , "stream" : true , "user":"a" ,"stream_options":{"include_usage":true},`,
		`{"stream_options":null,"model":"m","seed":null,"stream":null}`:                  `{"stream_options":{"include_usage":true},"model":"m","seed":7,"stream":true,`,
	} {
		p, err := Parse([]byte(in))
		if err != nil {
			t.Fatalf("%s: %v", in, err)
		}
		if got := string(bytes.Join(p.Streaming(7), nil)); got != want {
			t.Errorf("Streaming(%s)\n got %s\nwant %s", in, got, want)
		}
	}
}

// FuzzScan holds that scan takes exactly what encoding/json takes: objects, up to depthMax.
func FuzzScan(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":[1,-0.5e+7,true,false,null,"\u00e9\\"],"b":{"c":{}}}`, `{"a":01}`, `{"a":1.}`, `{"a"}`, `{,}`, `[1,]`, "{\"a\":\"\n\"}", `{"a":"\x"}`, ` {"a":1} x`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		members := 0
		closing, err := scan(b, func(key, value span) error {
			members++
			if !json.Valid(b[key.start:key.end]) || !json.Valid(b[value.start:value.end]) {
				t.Fatalf("member %q: %q is not valid", b[key.start:key.end], b[value.start:value.end])
			}
			return nil
		})
		if errors.Is(err, errDepth) {
			return
		}
		trimmed := bytes.TrimLeft(b, " \t\r\n")
		want := json.Valid(b) && len(trimmed) > 0 && trimmed[0] == '{'
		if want != (err == nil) {
			t.Fatalf("scan(%q) = %v, want valid %v", b, err, want)
		}
		if err == nil && b[closing] != '}' {
			t.Fatalf("scan(%q): no brace at %d", b, closing)
		}
	})
}

// FuzzStreaming holds that the splice gives valid JSON that differs from the client's in the three edited members only.
func FuzzStreaming(f *testing.F) {
	f.Add([]byte(`{"model":"m","stream":true,"stream_options":{"include_usage":false},"seed":null,"x":[1,2]}`), uint64(1))
	f.Add([]byte(`{ "seed": 5, "model":"m" }`), uint64(1)<<63)
	f.Fuzz(func(t *testing.T, b []byte, seed uint64) {
		before := bytes.Clone(b)
		p, refused := Parse(b)
		if refused != nil {
			return
		}
		out := append(bytes.Join(p.Streaming(seed), nil), `"kv_transfer_params":{}}`...)
		if !bytes.Equal(b, before) {
			t.Fatal("the client's bytes were changed")
		}
		var was, is map[string]json.RawMessage
		if err := json.Unmarshal(b, &was); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out, &is); err != nil {
			t.Fatalf("splice of %q gives %q: %v", b, out, err)
		}
		if string(is["stream"]) != "true" || string(is["stream_options"]) != `{"include_usage":true}` || len(is["seed"]) == 0 || string(is["seed"]) == "null" {
			t.Fatalf("splice of %q gives %q", b, out)
		}
		for _, k := range []string{"stream", "stream_options", "kv_transfer_params"} {
			delete(was, k)
			delete(is, k)
		}
		if p.Seed == "" {
			delete(was, "seed")
			delete(is, "seed")
		}
		if !reflect.DeepEqual(was, is) {
			t.Fatalf("splice of %q gives %q", b, out)
		}
	})
}

func TestParseN(t *testing.T) {
	for in, want := range map[string]int{`1`: 1, `3`: 3, `3.0`: 3, `128`: 128, `null`: 1, `0`: 1, `129`: 1, `"2"`: 1, `2.5`: 1, `[2]`: 1} {
		p, err := Parse([]byte(`{"model":"m","n":` + in + `}`))
		if err != nil || p.N != want {
			t.Errorf("%s: %+v %v, want %d", in, p, err, want)
		}
	}
}

// TestSkipPlain compares with a loop over bytes, at every alignment.
func TestSkipPlain(t *testing.T) {
	slow := func(b []byte, i int) int {
		for ; i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= 0x20; i++ {
		}
		return i
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		b := make([]byte, r.IntN(140))
		for i := range b {
			b[i] = byte(r.IntN(256))
			b[i] |= 0x60
			if r.IntN(30) == 0 { // around what is looked for
				b[i] = "\"\\\x1f\x20\x21\x23\x5b\x5d\x00\x01\xa2\xdc\x9f\xa0"[r.IntN(14)]
			}
		}
		for i := range len(b) + 1 {
			if got, want := skipPlain(b, i), slow(b, i); got != want {
				t.Fatalf("%q from %d: %d, want %d", b, i, got, want)
			}
		}
	}
}

func BenchmarkParse(b *testing.B) {
	for _, n := range []int{1 << 10, 20 << 10, 220_000} {
		doc := []byte(`{"model":"m","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("words and words\\n", n/17) + `"}]}`)
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			b.SetBytes(int64(len(doc)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Parse(doc); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
