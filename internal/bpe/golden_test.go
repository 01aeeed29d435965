package bpe

import (
	"compress/gzip"
	"encoding/json"
	"os"
	"slices"
	"sync"
	"testing"
)

type family struct {
	Name      string
	Tokenizer json.RawMessage
	Rows      []struct {
		Text       string
		IDs, Plain []uint32
	}
}

// families are the tokenizers of testdata/golden.py and what Hugging Face's `tokenizers` makes of texts with them.
var families = sync.OnceValues(func() ([]family, error) {
	f, err := os.Open("testdata/golden.json.gz")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	var g struct{ Families []family }
	err = json.NewDecoder(z).Decode(&g)
	return g.Families, err
})

func eachFamily(t testing.TB, f func(t *testing.T, fam *family, tok *Tokenizer)) {
	t.Helper()
	list, err := families()
	if err != nil || len(list) < 15 {
		t.Fatalf("%d families, %v", len(list), err)
	}
	for i := range list {
		fam := &list[i]
		tok, err := FromJSON(fam.Tokenizer)
		if err != nil {
			t.Fatalf("%s: %v", fam.Name, err)
		}
		if t, ok := t.(*testing.T); ok {
			t.Run(fam.Name, func(t *testing.T) { f(t, fam, tok) })
		} else {
			f(nil, fam, tok)
		}
	}
}

func TestGolden(t *testing.T) {
	eachFamily(t, func(t *testing.T, fam *family, tok *Tokenizer) {
		for range 2 { // the second time out of the cache of words
			for _, row := range fam.Rows {
				if got := tok.Encode(nil, row.Text, Options{Marks: true}); !slices.Equal(got, row.IDs) {
					t.Errorf("%q:\n got %v\nwant %v", row.Text, got, row.IDs)
				}
				if got := tok.Encode(nil, row.Text, Options{}); !slices.Equal(got, row.Plain) {
					t.Errorf("%q without marks:\n got %v\nwant %v", row.Text, got, row.Plain)
				}
			}
		}
	})
}
