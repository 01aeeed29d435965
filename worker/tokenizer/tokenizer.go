// Package tokenizer is byte-level BPE as GGUF files describe it: text to token ids and back.
//
// It reads its vocabulary, merges and special tokens from the model file's metadata and knows nothing of models, chats
// or HTTP. A Tokenizer does not change once it is made and may be used by many goroutines.
package tokenizer

import (
	"errors"
	"fmt"
	"strings"
)

// TextBytesMax bounds the text of one Encode.
const TextBytesMax = 16 << 20

// VocabMax bounds the number of tokens: ids are packed in pairs of 32 bits, and nobody has more.
const VocabMax = 1 << 22

// ErrTextTooLong is returned by Encode for text over TextBytesMax.
var ErrTextTooLong = errors.New("encode text: longer than 16 MiB")

// Metadata is what New reads; *gguf.File is one.
type Metadata interface {
	String(key string) (string, bool)
	Strings(key string) ([]string, bool)
	Ints(key string) ([]int64, bool)
	Uint(key string) (uint64, bool)
	Bool(key string) (bool, bool)
}

// Token types of GGUF.
const (
	typeNormal      = 1
	typeControl     = 3
	typeUserDefined = 4
)

// Tokenizer encodes and decodes. Make one with New.
type Tokenizer struct {
	pieces  [][]byte // by id: the bytes a token stands for
	control []bool   // by id
	byText  map[string]int32
	bytes   [256]int32 // single-byte tokens, -1 where the vocabulary has none
	merges  map[uint64]merge
	split   splitter
	special specials
	whole   bool // a piece that is a token is not merged, as Llama 3 wants it
	longest int

	bos, eos       int32
	ends           []int32
	addBOS, addEOS bool
}

// New reads a tokenizer from a model file's metadata.
func New(m Metadata) (*Tokenizer, error) {
	if kind, _ := m.String("tokenizer.ggml.model"); kind != "gpt2" {
		return nil, fmt.Errorf("read tokenizer: tokenizer.ggml.model is %q, only gpt2 (byte-level BPE) is known", kind)
	}
	pre, _ := m.String("tokenizer.ggml.pre")
	split, whole, err := splitterFor(pre)
	if err != nil {
		return nil, fmt.Errorf("read tokenizer: %w", err)
	}
	t := &Tokenizer{split: split, whole: whole}
	if err := t.readTokens(m); err != nil {
		return nil, fmt.Errorf("read tokenizer: %w", err)
	}
	if err := t.readMerges(m); err != nil {
		return nil, fmt.Errorf("read tokenizer: %w", err)
	}
	if err := t.readMarks(m, whole); err != nil {
		return nil, fmt.Errorf("read tokenizer: %w", err)
	}
	return t, nil
}

func (t *Tokenizer) readTokens(m Metadata) error {
	tokens, ok := m.Strings("tokenizer.ggml.tokens")
	if !ok || len(tokens) == 0 || len(tokens) > VocabMax {
		return fmt.Errorf("tokenizer.ggml.tokens holds %d strings, want 1 to %d", len(tokens), VocabMax)
	}
	types, ok := m.Ints("tokenizer.ggml.token_type")
	if ok && len(types) != len(tokens) {
		return fmt.Errorf("tokenizer.ggml.token_type holds %d values for %d tokens", len(types), len(tokens))
	}
	t.pieces = make([][]byte, len(tokens))
	t.control = make([]bool, len(tokens))
	t.byText = make(map[string]int32, len(tokens))
	for i := range t.bytes {
		t.bytes[i] = -1
	}
	var added []int32
	for i, text := range tokens {
		id, kind := int32(i), int64(typeNormal)
		if types != nil {
			kind = types[i]
		}
		if kind == typeControl || kind == typeUserDefined {
			t.pieces[i] = []byte(text)
			t.control[i] = kind == typeControl
			added = append(added, id)
			continue
		}
		piece := fromAlphabet(text)
		t.pieces[i] = piece
		t.longest = max(t.longest, len(piece))
		if _, dup := t.byText[string(piece)]; !dup {
			t.byText[string(piece)] = id
			if len(piece) == 1 {
				t.bytes[piece[0]] = id
			}
		}
	}
	t.special = newSpecials(added, t.pieces)
	return nil
}

func (t *Tokenizer) readMerges(m Metadata) error {
	merges, ok := m.Strings("tokenizer.ggml.merges")
	if !ok || len(merges) > VocabMax {
		return fmt.Errorf("tokenizer.ggml.merges holds %d strings, want at most %d", len(merges), VocabMax)
	}
	t.merges = make(map[uint64]merge, len(merges))
	for rank, s := range merges {
		// The separator is the first space behind the first character: no token of the alphabet contains one.
		a, b, ok := strings.Cut(s, " ")
		if !ok || a == "" || b == "" {
			return fmt.Errorf("merge %d is %.40q, want two tokens with a space between", rank, s)
		}
		left, right := fromAlphabet(a), fromAlphabet(b)
		l, okLeft := t.byText[string(left)]
		r, okRight := t.byText[string(right)]
		id, okBoth := t.byText[string(left)+string(right)]
		if !okLeft || !okRight || !okBoth {
			return fmt.Errorf("merge %d %.40q names a token that the vocabulary lacks", rank, s)
		}
		if _, dup := t.merges[pair(l, r)]; !dup {
			t.merges[pair(l, r)] = merge{rank: int32(rank), id: id}
		}
	}
	return nil
}

func (t *Tokenizer) readMarks(m Metadata, addByDefault bool) error {
	t.bos, t.eos = -1, -1
	seen := map[int32]bool{}
	for _, mark := range []struct {
		key string
		at  *int32
		end bool
	}{
		{"tokenizer.ggml.bos_token_id", &t.bos, false},
		{"tokenizer.ggml.eos_token_id", &t.eos, true},
		{"tokenizer.ggml.eot_token_id", nil, true},
		{"tokenizer.ggml.eom_token_id", nil, true},
	} {
		v, ok := m.Uint(mark.key)
		if !ok {
			continue
		}
		if v >= uint64(len(t.pieces)) {
			return fmt.Errorf("%s is %d, the vocabulary has %d tokens", mark.key, v, len(t.pieces))
		}
		id := int32(v)
		if mark.at != nil {
			*mark.at = id
		}
		if mark.end && !seen[id] {
			seen[id] = true
			t.ends = append(t.ends, id)
		}
	}
	t.addBOS = addByDefault
	if v, ok := m.Bool("tokenizer.ggml.add_bos_token"); ok {
		t.addBOS = v
	}
	t.addEOS, _ = m.Bool("tokenizer.ggml.add_eos_token")
	return nil
}

// EncodeOptions are the ways to encode. The zero value takes the text as ordinary text without any marks.
type EncodeOptions struct {
	// AddMarks puts the beginning and end tokens around the text when the model file asks for them.
	AddMarks bool
	// ParseSpecial turns the text of special tokens into these tokens, as Hugging Face and vLLM do.
	ParseSpecial bool
}

// Encode appends the text's token ids to dst. Bytes that are not UTF-8 are encoded as the bytes they are.
func (t *Tokenizer) Encode(dst []int32, text string, o EncodeOptions) ([]int32, error) {
	if len(text) > TextBytesMax {
		return dst, ErrTextTooLong
	}
	if o.AddMarks && t.addBOS && t.bos >= 0 {
		dst = append(dst, t.bos)
	}
	w := workspaces.Get().(*workspace)
	defer workspaces.Put(w)
	for o.ParseSpecial && text != "" {
		at, id := t.special.find(text)
		if id < 0 {
			break
		}
		dst = t.encodePlain(dst, text[:at], w)
		dst = append(dst, id)
		text = text[at+len(t.pieces[id]):]
	}
	dst = t.encodePlain(dst, text, w)
	if o.AddMarks && t.addEOS && t.eos >= 0 {
		dst = append(dst, t.eos)
	}
	return dst, nil
}

func (t *Tokenizer) encodePlain(dst []int32, text string, w *workspace) []int32 {
	t.split(text, func(piece string) {
		dst = t.encodePiece(dst, piece, w)
	})
	return dst
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

// TokenBytesMax returns the length of the longest ordinary token: n bytes of text without special tokens are at least
// n/TokenBytesMax tokens.
func (t *Tokenizer) TokenBytesMax() int { return max(t.longest, t.special.longest) }

// BOS returns the beginning token, and whether there is one.
func (t *Tokenizer) BOS() (int32, bool) { return t.bos, t.bos >= 0 }

// EOS returns the end token, and whether there is one.
func (t *Tokenizer) EOS() (int32, bool) { return t.eos, t.eos >= 0 }

// EndTokens returns the tokens that end a completion: end of text, of turn and of message, those that the file names.
func (t *Tokenizer) EndTokens() []int32 { return t.ends }
