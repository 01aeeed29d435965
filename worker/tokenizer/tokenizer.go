// Package tokenizer is the byte-level BPE of a GGUF model file: text to token ids and back.
//
// Encoding is internal/bpe's, so that the router, which uses the same, sees the tokens that the worker will see. This
// package adds the way back and the special tokens a model ends with; it knows nothing of models, chats or HTTP. A
// Tokenizer does not change once it is made and may be used by many goroutines.
package tokenizer

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/headrace/headrace/internal/bpe"
)

// TextBytesMax bounds the text of one Encode.
const TextBytesMax = 16 << 20

// ErrTextTooLong is returned by Encode for text over TextBytesMax.
var ErrTextTooLong = errors.New("encode text: longer than 16 MiB")

// Metadata is what New reads; *gguf.File is one.
type Metadata = bpe.Metadata

// Token types of GGUF.
const (
	typeControl     = 3
	typeUserDefined = 4
)

// Tokenizer encodes and decodes. Make one with New.
type Tokenizer struct {
	bpe     *bpe.Tokenizer
	marks   bpe.Marks
	pieces  [][]byte // by id: the bytes a token stands for
	control []bool   // by id
	longest int
}

// New reads a tokenizer from a model file's metadata.
func New(m Metadata) (*Tokenizer, error) {
	if kind, _ := m.String("tokenizer.ggml.model"); kind != "gpt2" {
		return nil, fmt.Errorf("read tokenizer: tokenizer.ggml.model is %q, only gpt2 (byte-level BPE) is known", kind)
	}
	encoder, marks, err := bpe.FromGGUF(m)
	if err != nil {
		return nil, err
	}
	t := &Tokenizer{bpe: encoder, marks: marks}
	t.readPieces(m)
	return t, nil
}

// readPieces reads what bpe.FromGGUF has checked.
func (t *Tokenizer) readPieces(m Metadata) {
	tokens, _ := m.Strings("tokenizer.ggml.tokens")
	types, _ := m.Ints("tokenizer.ggml.token_type")
	t.pieces = make([][]byte, len(tokens))
	t.control = make([]bool, len(tokens))
	for i, text := range tokens {
		if types != nil && (types[i] == typeControl || types[i] == typeUserDefined) {
			t.pieces[i] = []byte(text)
			t.control[i] = types[i] == typeControl
		} else {
			t.pieces[i], _ = bpe.FromAlphabet(text)
		}
		t.longest = max(t.longest, len(t.pieces[i]))
	}
}

// EncodeOptions are the ways to encode. The zero value takes the text as ordinary text without any marks.
type EncodeOptions struct {
	// AddMarks puts the beginning and end tokens around the text when the model file asks for them.
	AddMarks bool
	// ParseSpecial turns the text of special tokens into these tokens, as Hugging Face and vLLM do.
	ParseSpecial bool
}

var buffers = sync.Pool{New: func() any { return new([]uint32) }}

// Encode appends the text's token ids to dst. Bytes that are not UTF-8 are encoded as the bytes they are.
func (t *Tokenizer) Encode(dst []int32, text string, o EncodeOptions) ([]int32, error) {
	if len(text) > TextBytesMax {
		return dst, ErrTextTooLong
	}
	ids, _ := buffers.Get().(*[]uint32)
	defer buffers.Put(ids)
	*ids = t.bpe.Encode((*ids)[:0], text, bpe.Options{Marks: o.AddMarks, Plain: !o.ParseSpecial})
	dst = slices.Grow(dst, len(*ids))
	for _, id := range *ids {
		dst = append(dst, int32(id))
	}
	return dst, nil
}

// Decode appends the bytes of the tokens to dst; control tokens only when keepSpecial is set. Unknown ids yield nothing.
func (t *Tokenizer) Decode(dst []byte, ids []int32, keepSpecial bool) []byte {
	for _, id := range ids {
		if keepSpecial || !t.Special(id) {
			dst = append(dst, t.TokenBytes(id)...)
		}
	}
	return dst
}

// TokenBytes returns the bytes a token stands for, nil for an unknown id. They must not be changed.
func (t *Tokenizer) TokenBytes(id int32) []byte {
	if id < 0 || int(id) >= len(t.pieces) {
		return nil
	}
	return t.pieces[id]
}

// Special reports whether the token is a control token.
func (t *Tokenizer) Special(id int32) bool {
	return id >= 0 && int(id) < len(t.control) && t.control[id]
}

// Size returns the number of tokens.
func (t *Tokenizer) Size() int { return len(t.pieces) }

// TokenBytesMax returns the length of the longest token: n bytes of text are at least n/TokenBytesMax tokens.
func (t *Tokenizer) TokenBytesMax() int { return t.longest }

// BOS returns the beginning token, and whether there is one.
func (t *Tokenizer) BOS() (int32, bool) { return t.marks.BOS, t.marks.BOS >= 0 }

// EOS returns the end token, and whether there is one.
func (t *Tokenizer) EOS() (int32, bool) { return t.marks.EOS, t.marks.EOS >= 0 }

// EndTokens returns the tokens that end a completion: end of text, of turn and of message, those that the file names.
func (t *Tokenizer) EndTokens() []int32 { return t.marks.Ends }
