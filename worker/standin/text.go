package standin

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/worker/tokenizer"
)

// Token ids: the bytes, the end, then those that answers are made of. A prompt given as token ids may have any below Vocab.
const (
	endToken  = 256
	wordFirst = 257
	words     = 1024
	// Vocab is how many token ids there are.
	Vocab = 1 << 18
)

// text turns text into tokens: a token is so many bytes. With one byte it goes both ways; a token of several bytes is a
// number made from them, and no text can be had of it.
type text struct{ bytesPerToken int }

// wordTexts are the texts of the tokens that answers are made of.
var wordTexts = func() [][]byte {
	syllables := []string{"ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wu", "za"}
	list := make([][]byte, words)
	for i := range list {
		list[i] = []byte(" " + syllables[i%16] + syllables[i/16%16] + syllables[(i/256+i)%16])
	}
	return list
}()

// TokenBytes is a token's text. Tokens that stand for nothing are shown by their numbers.
func (text) TokenBytes(id int32) []byte {
	switch {
	case id < 0 || id >= Vocab:
		return nil
	case id < 256:
		return []byte{byte(id)}
	case id == endToken:
		return []byte("</s>")
	case id < wordFirst+words:
		return wordTexts[id-wordFirst]
	}
	return fmt.Append(nil, " ", id)
}

// Special knows the end.
func (text) Special(id int32) bool { return id == endToken }

// TokenBytesMax bounds a token's share of a prompt's text.
func (t text) TokenBytesMax() int { return t.bytesPerToken }

// Encode cuts text into tokens.
func (t text) Encode(dst []int32, s string, _ tokenizer.EncodeOptions) ([]int32, error) {
	if t.bytesPerToken == 1 {
		for i := range len(s) {
			dst = append(dst, int32(s[i]))
		}
		return dst, nil
	}
	for len(s) > 0 {
		n := min(t.bytesPerToken, len(s))
		dst = append(dst, wordFirst+words+int32(xxhash.Sum64String(s[:n])%(Vocab-wordFirst-words)))
		s = s[n:]
	}
	return dst, nil
}

// Decode is the text of tokens.
func (t text) Decode(dst []byte, ids []int32, keepSpecial bool) []byte {
	for _, id := range ids {
		if keepSpecial || !t.Special(id) {
			dst = append(dst, t.TokenBytes(id)...)
		}
	}
	return dst
}

// Render writes a conversation as "<|role|>content" after one another, so that one that goes on begins as it did.
func (text) Render(in chat.Input) (string, error) {
	var b strings.Builder
	b.Write(in.Tools)
	for i, m := range in.Messages {
		b.WriteString("<|" + m.Role + "|>" + m.Content)
		b.Write(m.ToolCalls)
		if !in.ContinueFinalMessage || i < len(in.Messages)-1 {
			b.WriteString("\n")
		}
	}
	if in.AddGenerationPrompt {
		b.WriteString("<|assistant|>")
	}
	return b.String(), nil
}

// drawn is what an answer's tokens are drawn from: a pure function of prompt, seed and choice.
func drawn(seed uint64, prompt []int32, sampling uint64, choice int) uint64 {
	h := xxhash.NewWithSeed(seed)
	var b [4096]byte
	for len(prompt) > 0 {
		n := min(len(prompt), len(b)/4)
		for i, id := range prompt[:n] {
			binary.LittleEndian.PutUint32(b[4*i:], uint32(id))
		}
		_, _ = h.Write(b[:4*n])
		prompt = prompt[n:]
	}
	binary.LittleEndian.PutUint64(b[:], sampling)
	binary.LittleEndian.PutUint64(b[8:], uint64(choice))
	_, _ = h.Write(b[:16])
	return h.Sum64()
}

// mix is a step of SplitMix64: a number that looks random for each i.
func mix(x, i uint64) uint64 {
	x += (i + 1) * 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
