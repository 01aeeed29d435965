package routertest

import (
	"fmt"
	"hash/fnv"
	"strconv"

	"github.com/headrace/headrace/internal/openai"
)

// Tokens of the fake model: words, and a character that comes in two tokens, so that text is held back.
const (
	tokenHalf1 = 1
	tokenHalf2 = 2
	tokenEOS   = 3
	firstWord  = 100
)

type vocab struct{}

func (vocab) TokenBytes(id int32) []byte {
	switch id {
	case tokenHalf1:
		return []byte{0xe2, 0x82}
	case tokenHalf2:
		return []byte{0xac, ' '}
	case tokenEOS:
		return nil
	}
	return strconv.AppendInt([]byte("w"), int64(id), 10)
}

func (vocab) Special(id int32) bool { return id == tokenEOS }

// tokenAt is the fake model: a pure function of prompt, seed and position.
func tokenAt(prompt string, seed uint64, pos int) int32 {
	switch pos % 5 {
	case 2:
		return tokenHalf1
	case 3:
		return tokenHalf2
	}
	h := fnv.New32a()
	fmt.Fprintf(h, "%s/%d/%d", prompt, seed, pos)
	return firstWord + int32(h.Sum32()%9000)
}

// Text is what a request for n tokens must be answered with.
func Text(prompt string, seed uint64, n int) string {
	d := openai.NewDetok(vocab{}, openai.DetokOptions{})
	var out []byte
	for i := range n {
		t, _ := d.Push(tokenAt(prompt, seed, i))
		out = append(out, t...)
	}
	return string(append(out, d.Flush()...))
}
