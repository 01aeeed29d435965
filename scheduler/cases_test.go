package scheduler_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/scheduler"
	"github.com/headrace/headrace/scheduler/snapfile"
)

// decide reads a snapshot and answers the decision's JSON.
func decide(t *testing.T, text []byte) []byte {
	t.Helper()
	s, err := snapfile.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	d, err := scheduler.Decide(s)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := scheduler.WriteJSON(&out, d); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// TestCases holds every worked case of the sources to its printed digits: a case is a snapshot that says in comments what its
// decision must have ("# want: path = value", "# want: path ~ part of the text").
func TestCases(t *testing.T) {
	files, err := filepath.Glob("testdata/cases/*.yaml")
	if err != nil || len(files) < 40 {
		t.Fatalf("%d cases, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := decide(t, text)
			wants := 0
			for line := range strings.Lines(string(text)) {
				want, ok := strings.CutPrefix(strings.TrimSpace(line), "# want: ")
				if !ok {
					continue
				}
				wants++
				if problem := holds(got, want); problem != "" {
					t.Errorf("%s: %s", want, problem)
				}
			}
			if wants == 0 {
				t.Error("the case wants nothing")
			}
			if t.Failed() {
				t.Logf("%s", got)
			}
			if again := decide(t, text); !bytes.Equal(got, again) {
				t.Error("the same snapshot gave other bytes")
			}
		})
	}
}

// holds checks one expectation; a number is compared at as many decimals as are written.
func holds(got []byte, want string) string {
	path, value, ok := strings.Cut(want, " = ")
	if !ok {
		path, value, _ = strings.Cut(want, " ~ ")
		if r := gjson.GetBytes(got, path); !strings.Contains(r.String(), value) {
			return "it is " + strconv.Quote(r.String())
		}
		return ""
	}
	r := gjson.GetBytes(got, path)
	text := r.String()
	if r.IsArray() {
		text = strings.Join(strings.Fields(r.Raw), "")
	}
	if r.Type == gjson.Number {
		_, decimals, _ := strings.Cut(value, ".")
		text = strconv.FormatFloat(r.Num, 'f', len(decimals), 64)
	}
	if !r.Exists() || text != value {
		return "it is " + strconv.Quote(text)
	}
	return ""
}
