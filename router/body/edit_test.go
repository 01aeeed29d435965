package body

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"
)

func parse(t *testing.T, in string) *Body {
	t.Helper()
	p, refused := Parse([]byte(in))
	if refused != nil {
		t.Fatalf("%s: %v", in, refused)
	}
	return p
}

func TestWith(t *testing.T) {
	for in, want := range map[string]string{
		`{"model":"m"}`: `{"model":"m","a":1}`,
		` { "model" : "m" , "x":9007199254740993 }
`: ` { "model" : "m" , "x":9007199254740993 ,"a":1}
`,
	} {
		if got := string(bytes.Join(parse(t, in).With([]byte(`"a":1`)), nil)); got != want {
			t.Errorf("With(%s) = %s", in, got)
		}
	}
}

func TestWithout(t *testing.T) {
	drop := map[string]bool{"n": true, "stop": true, "x": true}
	for in, want := range map[string]string{
		`{"model":"m"}`:              `{"model":"m","a":1}`,
		`{"n":1,"model":"m"}`:        `{"model":"m","a":1}`,
		`{"model":"m" , "stop":[ ]}`: `{"model":"m","a":1}`,
		`{"stop":{"n":[1]}, "n":2, "model" :  "m", "big":18446744073709551615,"st\u006fp":1,"y":{"n":1} }`: `{"model" :  "m", "big":18446744073709551615,"y":{"n":1},"a":1}`,
		`{"x":1,"model":"m","x":2,"é":null,"x":3}`:                                                         `{"model":"m","é":null,"a":1}`,
	} {
		if got := string(bytes.Join(parse(t, in).Without(drop, []byte(`"a":1`)), nil)); got != want {
			t.Errorf("Without(%s) = %s, want %s", in, got, want)
		}
	}
	if got := string(bytes.Join(parse(t, `{"n":1,"model":"m"}`).Without(map[string]bool{"n": true, "model": true}, nil), nil)); got != `{}` {
		t.Errorf("nothing left: %s", got)
	}
}

func TestValue(t *testing.T) {
	p := parse(t, `{"model":"m","a":1,"b":null,"a": [ 2 ] ,"c":false,"d":1,"d":null}`)
	for name, want := range map[string]string{"a": "[ 2 ]", "b": "", "c": "false", "d": "", "e": ""} {
		if got := string(p.Value(name)); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

func TestPrompts(t *testing.T) {
	for in, want := range map[string]int{
		`"a"`: 1, `null`: 1, `[1,2,3]`: 1, `[]`: 1, `["a"]`: 1, `[ [ 1 , 2 ] ]`: 1, `["a", "b"]`: 2, `["a,]", "b", "c"]`: 3, `[[1],[2]]`: 2, `[ [1,[2]] , [3] ]`: 2, `["\"]","x"]`: 2,
	} {
		if got := parse(t, `{"model":"m","prompt":`+in+`}`).Prompts(); got != want {
			t.Errorf("%s: %d prompts, want %d", in, got, want)
		}
	}
	if got := parse(t, `{"model":"m"}`).Prompts(); got != 1 {
		t.Errorf("no prompt: %d", got)
	}
}

func TestMember(t *testing.T) {
	for in, want := range map[string]string{
		`{"a":{"kv":1},"kv": {"x":[1e400]} ,"z":1}`: `{"x":[1e400]}`, `{"kv":null}`: "", `{}`: "", `[1]`: "", `{"kv":1`: "", ``: "", `{"k\u0076":1}`: "1",
	} {
		if got := string(Member([]byte(in), "kv")); got != want {
			t.Errorf("%s: %q, want %q", in, got, want)
		}
	}
}

// FuzzEdits holds that what is taken out and put in is all that changes.
func FuzzEdits(f *testing.F) {
	for _, s := range []string{`{"model":"m","n":1,"stop":[1],"prompt":["a","b"]}`, `{ "n":1 , "model":"m"}`, `{"model":"m","\u006e":2,"x":{}}`, `{"model":"m"}`} {
		f.Add([]byte(s))
	}
	drop := map[string]bool{"n": true, "stop": true}
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		p, refused := Parse(b)
		if refused != nil {
			return
		}
		_ = p.Prompts()
		with, without := bytes.Join(p.With([]byte(`"kv_transfer_params":{}`)), nil), bytes.Join(p.Without(drop, []byte(`"kv_transfer_params":{}`)), nil)
		if !bytes.Equal(b, before) {
			t.Fatal("the client's bytes were changed")
		}
		var was, more, less map[string]json.RawMessage
		if json.Unmarshal(b, &was) != nil || json.Unmarshal(with, &more) != nil || json.Unmarshal(without, &less) != nil {
			t.Fatalf("%q gives %q and %q", b, with, without)
		}
		if string(more["kv_transfer_params"]) != "{}" || string(less["kv_transfer_params"]) != "{}" {
			t.Fatalf("%q gives %q and %q", b, with, without)
		}
		delete(more, "kv_transfer_params")
		delete(less, "kv_transfer_params")
		if !reflect.DeepEqual(was, more) {
			t.Fatalf("%q gives %q", b, with)
		}
		delete(was, "n")
		delete(was, "stop")
		if !reflect.DeepEqual(was, less) {
			t.Fatalf("%q gives %q", b, without)
		}
	})
}
