package bpe

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// BenchmarkEncode encodes texts with the tokenizer.json files that HEADRACE_TOKENIZERS names (a pattern), or the small ones
// of the tests. The texts are the files that HEADRACE_TEXTS names, or this repository's pages and source. With
// HEADRACE_PYTHON, an interpreter that has Hugging Face's tokenizers, it reports how many times faster we are than they.
// "cold" has the cache of words emptied before every text.
//
//	HEADRACE_TOKENIZERS='DIR/*.json' HEADRACE_PYTHON=python go test ./internal/bpe -run '^$' -bench Encode -cpu 1
func BenchmarkEncode(b *testing.B) {
	dir := b.TempDir()
	for name, file := range benchTokenizers(b, dir) {
		data, err := os.ReadFile(file)
		if err != nil {
			b.Fatal(err)
		}
		tok, err := FromJSON(data)
		if err != nil {
			b.Fatal(err)
		}
		for kind, text := range benchTexts(b, dir) {
			b.Run(name+"/"+kind, func(b *testing.B) { benchmarkText(b, tok, file, text) })
		}
	}
}

func benchmarkText(b *testing.B, tok *Tokenizer, file, textFile string) {
	data, err := os.ReadFile(textFile)
	if err != nil {
		b.Fatal(err)
	}
	text := string(data)
	peer := 0.0
	if python := os.Getenv("HEADRACE_PYTHON"); python != "" {
		out, err := exec.Command(python, "testdata/speed.py", file, textFile).Output()
		if err != nil {
			b.Fatal(err)
		}
		if peer, err = strconv.ParseFloat(strings.TrimSpace(string(out)), 64); err != nil {
			b.Fatal(err)
		}
	}
	for _, name := range []string{"cold", "warm"} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			var dst []uint32
			for b.Loop() {
				if name == "cold" {
					b.StopTimer()
					clear(tok.model.cache.slots)
					b.StartTimer()
				}
				dst = tok.Encode(dst[:0], text, Options{})
			}
			if peer > 0 {
				rate := float64(len(text)) * float64(b.N) / b.Elapsed().Seconds() / 1e6
				b.ReportMetric(peer, "hf-MB/s")
				b.ReportMetric(rate/peer, "x-hf")
			}
		})
	}
}

// benchTokenizers returns files of tokenizers by name.
func benchTokenizers(b *testing.B, dir string) map[string]string {
	out := map[string]string{}
	if pattern := os.Getenv("HEADRACE_TOKENIZERS"); pattern != "" {
		files, err := filepath.Glob(pattern)
		if err != nil {
			b.Fatal(err)
		}
		for _, file := range files {
			out[strings.ReplaceAll(strings.Trim(file, "/"), "/", "_")] = file
		}
		return out
	}
	list, err := families()
	if err != nil {
		b.Fatal(err)
	}
	for _, f := range list {
		out[f.Name] = filepath.Join(dir, f.Name+".json")
		if err := os.WriteFile(out[f.Name], f.Tokenizer, 0o600); err != nil {
			b.Fatal(err)
		}
	}
	return out
}

// benchTexts returns files of text by kind.
func benchTexts(b *testing.B, dir string) map[string]string {
	out := map[string]string{}
	patterns := map[string]string{"english": "../../docs/*.md", "code": "../../router/*.go"}
	if more := os.Getenv("HEADRACE_TEXTS"); more != "" {
		files, err := filepath.Glob(more)
		if err != nil {
			b.Fatal(err)
		}
		for _, file := range files {
			patterns[filepath.Base(file)] = file
		}
	}
	for kind, pattern := range patterns {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			b.Fatalf("%s: no files (%v)", pattern, err)
		}
		var text strings.Builder
		for _, file := range files {
			t, err := os.ReadFile(file)
			if err != nil {
				b.Fatal(err)
			}
			text.Write(t)
		}
		out[kind] = filepath.Join(dir, kind+".text")
		if err := os.WriteFile(out[kind], []byte(strings.ToValidUTF8(text.String(), "")), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	return out
}
