package router

import (
	"encoding/json"
	"testing"
)

// FuzzUsage holds what is read from an answer's end beside what is read by looking through all of it.
func FuzzUsage(f *testing.F) {
	for _, answer := range []string{
		`{"id":"a","choices":[{"message":{"content":"\"usage\":{\"prompt_tokens\":9}"}}],"usage":{"prompt_tokens":12,"total_tokens":20,"completion_tokens":8,"prompt_tokens_details":null}}`,
		`{"choices":[],"usage":{"prompt_tokens": 12, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 5}}, "kv_transfer_params": null}`,
		`{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2},"kv_transfer_params":{"a":1}}`, `{"choices":[{"usage":{"prompt_tokens":1}}]}`,
		`{"usage":{"prompt_tokens":1.5,"completion_tokens":-2}}`, `{"usage":{}}`, `{"usage":{"prompt_tokens":1,}}`, `{"usage":null}`, `{"a":{"usage":{"prompt_tokens":3}}}`,
		`{"meta_info":{"prompt_tokens":3,"cached_tokens":1,"completion_tokens":2}}`, `{"usage":{"input_tokens":3,"output_tokens":2,"input_tokens_details":{"cached_tokens":1},"output_tokens_details":{"reasoning_tokens":0}}}` + "\n",
		`{"usage":{"prompt_tokens":1},"usage":{"prompt_tokens":2}}`, `{"usage":{"prompt_tokens":1},"s":"}"}`,
	} {
		f.Add([]byte(answer))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		var quick, slow usage
		if !quick.atEnd(answer) || !json.Valid(answer) {
			return
		}
		slow.lookThrough(answer)
		if quick != slow {
			t.Errorf("%q: %+v, and %+v when looked through", answer, quick, slow)
		}
	})
}

func TestUsageAtEnd(t *testing.T) {
	answer := `{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":12,"total_tokens":20,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":4}},"x":null}`
	var u usage
	if !u.atEnd([]byte(answer)) || u.Prompt != 12 || u.Completion != 8 || u.Cached != 4 || !u.known {
		t.Errorf("%+v", u)
	}
	if u.atEnd([]byte(`{"choices":[{"usage":{"prompt_tokens":1}}]}`)) {
		t.Error("took a choice's usage for the answer's")
	}
}
