package e2e

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/headrace/headrace/internal/trace"
)

// What a request's client got back as its id shows, through the real parts, when its KV cache moved.
func TestTraceShowsTheTransfer(t *testing.T) {
	c := start(t, options{nodes: 2})
	c.routed()
	r := request{Prompt: seededPrompt(91_000, 200), MaxTokens: 8}
	a := postWith(c.url(), r, http.Header{"X-Request-Id": {"traced-1"}}).wait()
	if !a.Done {
		t.Fatal(a.outcome())
	}
	run := func(args ...string) (string, error) {
		cmd := exec.Command(bin(t), append([]string{"trace", "--data-dir", c.data}, args...)...)
		cmd.Env = c.environ()
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		return out.String(), err
	}
	text, err := run("--json", "traced-1")
	if err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	var got trace.Trace
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	sides := map[string]bool{}
	for _, d := range got.Daemons {
		for _, l := range d.Leases {
			sides[l.Side] = true
			if l.State != "settled" || l.Bound == nil || l.First == nil || l.Ended == nil || l.Bytes == 0 || l.Lanes == 0 || l.Ended.Before(*l.First) {
				t.Errorf("%s: %+v", d.Node, l)
			}
		}
	}
	if !sides["source"] || !sides["target"] || got.Request == nil || got.Request.Tokens != 8 || len(got.Request.Attempts) != 1 {
		t.Errorf("sides %v in\n%s", sides, text)
	}
	if text, err := run("traced-1"); err != nil || !strings.Contains(text, "lease, target") || !strings.Contains(text, "####") {
		t.Errorf("%v: %s", err, text)
	}
	if text, err := run(); err != nil || !strings.Contains(text, "traced-1") {
		t.Errorf("%v: %s", err, text)
	}
	if text, err := run("nobody"); err == nil || !strings.Contains(text, "no router remembers") {
		t.Errorf("an id that nobody has: %v, %s", err, text)
	}
}
