package bpe

import (
	"bufio"
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// difference encodes texts with Hugging Face's tokenizers too.
func difference(t *testing.T, python, file string, tok *Tokenizer, texts []string) {
	t.Helper()
	var in bytes.Buffer
	for _, text := range texts {
		line, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		in.Write(append(line, '\n'))
	}
	cmd := exec.Command(python, "testdata/encode.py", file)
	cmd.Stdin, cmd.Stderr = &in, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 64<<20)
	bad := 0
	for _, text := range texts {
		if !lines.Scan() {
			t.Fatal("too few lines")
		}
		var want []uint32
		for _, f := range strings.Fields(lines.Text()) {
			id, err := strconv.ParseUint(f, 10, 32)
			if err != nil {
				t.Fatal(err)
			}
			want = append(want, uint32(id))
		}
		if got := tok.Encode(nil, text, Options{Marks: true}); !slices.Equal(got, want) {
			t.Errorf("%q:\n got %v\nwant %v", text, got, want)
			if bad++; bad > 5 {
				return
			}
		}
	}
}

func TestReal(t *testing.T) {
	dir, python := os.Getenv("HEADRACE_TOKENIZERS"), os.Getenv("HEADRACE_PYTHON")
	if dir == "" {
		t.Skip("HEADRACE_TOKENIZERS names no folder")
	}
	files, _ := filepath.Glob(dir)
	for _, file := range files {
		t.Run(file, func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			tok, err := FromJSON(b)
			if err != nil {
				t.Fatal(err)
			}
			var added []string
			for _, a := range slices.Concat(tok.raw.tokens, tok.normalized.tokens) {
				added = append(added, a.Text)
			}
			rng := rand.New(rand.NewPCG(1, 2))
			var texts []string
			for range 3000 {
				texts = append(texts, randomText(rng, added))
			}
			difference(t, python, file, tok, texts)
		})
	}
}
