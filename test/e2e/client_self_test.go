package e2e

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestClientSees: the tests' own client must not overlook what they are there to find.
func TestClientSees(t *testing.T) {
	chunk := func(tokens, text, finish string) string {
		return fmt.Sprintf(`data: {"id":"cmpl-1","created":1,"model":"m","choices":[{"index":0,"text":%q,"token_ids":[%s],"finish_reason":%s}]}`+"\n\n", text, tokens, finish)
	}
	const use = `data: {"id":"cmpl-1","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3,"total_tokens":4}}` + "\n\n"
	const done = "data: [DONE]\n\n"
	good := chunk("5", "a", "null") + chunk("6,7", "bc", "null") + chunk("", "", `"length"`)
	want := &answer{Tokens: []int32{5, 6, 7}, Text: "abc", Finish: "length", Usage: &usage{Prompt: 1, Completion: 3}}
	const failure = `data: {"error":{"message":"gone","type":"server_error","param":null,"code":"x"}}` + "\n\n"

	for name, c := range map[string]struct {
		body  string
		right bool // equals
		clear bool // equalsOrFails
	}{
		"right":                   {good + use + done, true, true},
		"heartbeats are allowed":  {": hb\n\n" + good + use + done, true, true},
		"cut off":                 {good + use, false, false},
		"cut off early":           {chunk("5", "a", "null"), false, false},
		"empty":                   {"", false, false},
		"a token too few":         {chunk("5", "a", "null") + chunk("6", "bc", `"length"`) + use + done, false, false},
		"a token twice":           {chunk("5", "a", "null") + good + use + done, false, false},
		"text lost":               {strings.Replace(good, `"bc"`, `"b"`, 1) + use + done, false, false},
		"no usage":                {good + done, false, false},
		"usage twice":             {good + use + use + done, false, false},
		"wrong usage":             {good + strings.Replace(use, `n_tokens":3`, `n_tokens":4`, 1) + done, false, false},
		"after the end":           {good + use + done + chunk("8", "d", "null"), false, false},
		"another id":              {good + strings.Replace(use, "cmpl-1", "cmpl-2", 1) + done, false, false},
		"the dialect leaks":       {": t 5\n\n" + good + use + done, false, false},
		"an error":                {chunk("5", "a", "null") + failure, false, true},
		"an error without words":  {chunk("5", "a", "null") + strings.Replace(failure, "gone", "", 1), false, false},
		"an error, wrong before":  {chunk("9", "z", "null") + failure, false, false},
		"going on after an error": {failure + good, false, false},
		"two finish reasons":      {good + chunk("", "", `"stop"`) + use + done, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = w.Write([]byte(c.body))
			}))
			defer srv.Close()
			a := ask(srv.URL, request{Prompt: []int32{1}, MaxTokens: 3, Stream: true})
			if err := a.equals(want); (err == nil) != c.right {
				t.Errorf("equals: %v, want right %v", err, c.right)
			}
			if err := a.equalsOrFails(want); (err == nil) != c.clear {
				t.Errorf("equalsOrFails: %v, want clear %v", err, c.clear)
			}
		})
	}
}
