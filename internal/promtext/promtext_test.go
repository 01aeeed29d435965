package promtext

import (
	"errors"
	"maps"
	"strings"
	"testing"
	"testing/iotest"
)

func all([]byte) bool { return true }

func read(text string, wanted func([]byte) bool) (got []Sample, err error) {
	err = Read(strings.NewReader(text), wanted, func(s Sample) { got = append(got, s) })
	return got, err
}

func TestRead(t *testing.T) {
	text := "# HELP a b\n# TYPE a gauge\n\na 1\n  b{} 2.5 1700000000\nc{x=\"1\", y=\"a\\\"}b\\n\\\\\",} -3e2\nd\t+Inf\n"
	got, err := read(text, all)
	if err != nil || len(got) != 4 {
		t.Fatalf("%v of %+v", err, got)
	}
	want := map[string]string{"x": "1", "y": "a\"}b\n\\"}
	if got[0].Value != 1 || got[1].Name != "b" || got[1].Value != 2.5 || got[2].Value != -300 || !maps.Equal(got[2].Labels, want) || got[3].Name != "d" {
		t.Errorf("%+v", got)
	}
	got, err = read(text, func(name []byte) bool { return string(name) == "b" })
	if err != nil || len(got) != 1 || got[0].Value != 2.5 {
		t.Errorf("%v of %+v", err, got)
	}
}

// TestTornLines: one that is wanted is told of, and costs none of the others.
func TestTornLines(t *testing.T) {
	for _, torn := range []string{"a", "a ", "a x", `a{`, `a{x`, `a{x="`, `a{x="1\`, `a{x="1" 3`, `a{x="1"}`} {
		got, err := read("b 1\n"+torn+"\nb 2\n", all)
		if err == nil || len(got) != 2 {
			t.Errorf("%q: %v, %+v", torn, err, got)
		}
		if got, err = read(torn+"\nb 2\n", func(name []byte) bool { return name[0] == 'b' }); err != nil || len(got) != 1 {
			t.Errorf("%q, not wanted: %v, %+v", torn, err, got)
		}
	}
}

func TestLimits(t *testing.T) {
	for name, text := range map[string]string{
		"a long line": strings.Repeat("x", LineBytesMax+1),
		"too much":    strings.Repeat("# some comment that says nothing\n", BytesMax/32),
		"too many":    strings.Repeat("a 1\n", SamplesMax+1),
	} {
		if _, err := read(text, all); !errors.Is(err, ErrLimit) {
			t.Errorf("%s: %v", name, err)
		}
	}
	broken := errors.New("broken")
	if err := Read(iotest.ErrReader(broken), all, func(Sample) {}); !errors.Is(err, broken) {
		t.Error(err)
	}
}

// FuzzRead holds that a sample is read whatever stands around it.
func FuzzRead(f *testing.F) {
	f.Add("# HELP a b\n", "x")
	f.Add("broken{\nbroken{a=\"\n{} 1\nx y", "a\"}b\n\\")
	f.Fuzz(func(t *testing.T, around, value string) {
		if _, err := read(around, all); errors.Is(err, ErrLimit) {
			return
		}
		quoted := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(value)
		line := "\nfuzz:sample{v=\"" + quoted + "\"} 7\n"
		if len(line) > LineBytesMax {
			return
		}
		var got []Sample
		_ = Read(strings.NewReader(around+line+around), func(name []byte) bool { return string(name) == "fuzz:sample" }, func(s Sample) { got = append(got, s) })
		if len(got) == 0 {
			t.Fatalf("not found behind %q", around)
		}
		found := false
		for _, s := range got {
			found = found || s.Value == 7 && s.Labels["v"] == value
		}
		if !found {
			t.Errorf("%+v, wanted %q", got, value)
		}
	})
}
