// Package bpe turns text into the token ids of a model: byte-pair encoding as Hugging Face's tokenizer.json and GGUF
// files describe it, for byte-level vocabularies (GPT-2, Llama 3, Qwen, DeepSeek, GPT-4o, Tekken) and those of
// SentencePiece (Llama 2, Mistral, Gemma).
//
// It is held against Hugging Face's `tokenizers`: the same text gives the same ids. What a file asks for and this package
// does not know is ErrUnsupported when the file is read, never a wrong token later. It knows nothing of models, chats or
// HTTP. A Tokenizer does not change once it is made and may be used by many goroutines.
package bpe

import "errors"

// ErrUnsupported is wrapped by the errors about files that ask for what this package does not do.
var ErrUnsupported = errors.New("tokenizer not supported")

// VocabMax bounds the number of tokens: nobody has more.
const VocabMax = 1 << 22

// Tokenizer encodes text. Make one with FromJSON or FromGGUF.
type Tokenizer struct {
	model      model
	steps      []step    // normalizers
	raw        *addedSet // looked for in the text as it is
	normalized *addedSet // looked for in normalized text
	chain      []scanner // the pre-tokenizer: each cuts the pieces of the one before
	meta       metaspace
	addSpace   bool // ByteLevel's add_prefix_space
	before     []uint32
	behind     []uint32
	context    bool // a token's match depends on text that lies behind an earlier token
}

// metaspace is the pre-tokenizer that writes spaces as another character.
type metaspace struct {
	mark   string
	prefix prefix
}

// prefix says which pieces metaspace puts a mark before.
type prefix uint8

const (
	prefixNever prefix = iota
	prefixFirst        // that at the very beginning of the text
	prefixAlways
)

// Options are the ways to encode. The zero value splits text at added tokens and adds none of its own.
type Options struct {
	// Marks puts the beginning and end tokens around the text where the file asks for them.
	Marks bool
	// Plain takes the text of added tokens as ordinary text.
	Plain bool
	// Inside says that the text follows other text of the same prompt, that was cut at a Cut.
	Inside bool
}

// Cut is a place where text falls into parts that are encoded independently: behind an added token. The tokens of
// text[:Text] are the first Tokens of those that Encode appended, whatever follows; those of text[Text:] are what Encode
// makes of it with Options.Inside. Zero where there is no such place.
type Cut struct{ Text, Tokens int }

// Encode appends the token ids of text to dst. Bytes that are not UTF-8 are encoded as the bytes they are.
func (t *Tokenizer) Encode(dst []uint32, text string, o Options) []uint32 {
	dst, _ = t.EncodeCut(dst, text, o)
	return dst
}

// EncodeCut is Encode that also returns the last Cut of the text.
func (t *Tokenizer) EncodeCut(dst []uint32, text string, o Options) ([]uint32, Cut) {
	w, _ := workspaces.Get().(*workspace)
	defer w.release()
	start := len(dst)
	if o.Marks && !o.Inside {
		dst = append(dst, t.before...)
	}
	var cut Cut
	f := finder{set: t.raw, text: text}
	for !o.Plain {
		first := f.at == 0 && !o.Inside
		token, part := f.next()
		if token == nil {
			break
		}
		dst = t.encodePart(dst, part, first, o.Plain, w)
		dst = append(dst, token.ID)
		if !token.RightStrip && !t.context && !f.open {
			cut = Cut{Text: f.at, Tokens: len(dst) - start}
		}
	}
	dst = t.encodePart(dst, text[f.at:], f.at == 0 && !o.Inside, o.Plain, w)
	if o.Marks {
		dst = append(dst, t.behind...)
	}
	return dst, cut
}

// Marks returns the tokens that Options.Marks puts before and behind a text. They must not be changed.
func (t *Tokenizer) Marks() (before, behind []uint32) { return t.before, t.behind }

// encodePart encodes text without raw added tokens. first says that it begins the prompt.
func (t *Tokenizer) encodePart(dst []uint32, text string, first, plain bool, w *workspace) []uint32 {
	if text == "" {
		return dst
	}
	text = t.normalize(text, w)
	f := finder{set: t.normalized, text: text}
	for !plain {
		first := first && f.at == 0
		token, piece := f.next()
		if token == nil {
			break
		}
		dst = t.encodePiece(dst, piece, first, w)
		dst = append(dst, token.ID)
	}
	return t.encodePiece(dst, text[f.at:], first && f.at == 0, w)
}

// encodePiece pre-tokenizes text without added tokens and encodes the pieces.
func (t *Tokenizer) encodePiece(dst []uint32, text string, first bool, w *workspace) []uint32 {
	if text == "" {
		return dst
	}
	if t.meta.mark != "" {
		text = t.meta.apply(text, first, w)
	} else if t.addSpace && text[0] != ' ' {
		w.spare = append(append(w.spare[:0], ' '), text...)
		text = view(w.spare)
	}
	return t.split(dst, text, t.chain, w)
}

func (t *Tokenizer) split(dst []uint32, text string, chain []scanner, w *workspace) []uint32 {
	switch len(chain) {
	case 0:
		return t.model.encode(dst, text, w)
	case 1:
		for next := chain[0]; text != ""; {
			n := next(text)
			dst = t.model.encode(dst, text[:n], w)
			text = text[n:]
		}
		return dst
	}
	for next := chain[0]; text != ""; {
		n := next(text)
		dst = t.split(dst, text[:n], chain[1:], w)
		text = text[n:]
	}
	return dst
}

// apply writes the spaces of text as marks and puts one before it where the scheme says so.
func (m *metaspace) apply(text string, first bool, w *workspace) string {
	out := w.spare[:0]
	if text[0] != ' ' && (len(text) < len(m.mark) || text[:len(m.mark)] != m.mark) &&
		(m.prefix == prefixAlways || m.prefix == prefixFirst && first) {
		out = append(out, m.mark...)
	}
	for i := range len(text) {
		if text[i] == ' ' {
			out = append(out, m.mark...)
		} else {
			out = append(out, text[i])
		}
	}
	w.spare = out
	return view(out)
}
