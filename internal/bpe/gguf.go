package bpe

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Metadata is what FromGGUF reads; *gguf.File is one.
type Metadata interface {
	String(key string) (string, bool)
	Strings(key string) ([]string, bool)
	Ints(key string) ([]int64, bool)
	Floats(key string) ([]float64, bool)
	Uint(key string) (uint64, bool)
	Bool(key string) (bool, bool)
}

// Token types of GGUF.
const (
	typeNormal      = 1
	typeUnknown     = 2
	typeControl     = 3
	typeUserDefined = 4
)

// pres are the pre-tokenizers that GGUF files name.
var pres = map[string]struct {
	chain []scanner
	whole bool // a piece that is a token is not merged, as Llama 3 wants it; such files ask for BOS unless they say otherwise
}{
	"":                 {chain: []scanner{scanGPT2}},
	"default":          {chain: []scanner{scanGPT2}},
	"gpt-2":            {chain: []scanner{scanGPT2}},
	"gpt2":             {chain: []scanner{scanGPT2}},
	"smollm":           {chain: []scanner{scanDigit, scanGPT2}},
	"llama-bpe":        {chain: []scanner{scanLlama(3, letter)}, whole: true},
	"llama3":           {chain: []scanner{scanLlama(3, letter)}, whole: true},
	"llama-v3":         {chain: []scanner{scanLlama(3, letter)}, whole: true},
	"qwen2":            {chain: []scanner{scanLlama(1, letter)}},
	"deepseek-r1-qwen": {chain: []scanner{scanLlama(1, letter)}},
	"qwen35":           {chain: []scanner{scanLlama(1, letter|mark)}},
	"deepseek-v3":      {chain: []scanner{scanDigits3, scanCJK, scanDeepSeek}},
	"gpt-4o":           {chain: []scanner{scanO200k(3, true)}},
	"llama4":           {chain: []scanner{scanO200k(3, true)}},
	"tekken":           {chain: []scanner{scanO200k(1, false)}, whole: true},
}

// Marks are the special tokens that a GGUF file names; the ids are -1 where it names none.
type Marks struct {
	BOS, EOS int32
	Ends     []int32 // end of text, of turn and of message
	AddBOS   bool
	AddEOS   bool
}

// FromGGUF reads a tokenizer from a model file's metadata. Errors wrap ErrUnsupported as those of FromJSON do.
func FromGGUF(m Metadata) (*Tokenizer, Marks, error) {
	t := new(Tokenizer)
	marks, err := t.readGGUF(m)
	if err != nil {
		return nil, Marks{}, fmt.Errorf("read tokenizer: %w", err)
	}
	return t, marks, nil
}

func (t *Tokenizer) readGGUF(m Metadata) (Marks, error) {
	tokens, ok := m.Strings("tokenizer.ggml.tokens")
	if !ok || len(tokens) == 0 || len(tokens) > VocabMax {
		return Marks{}, fmt.Errorf("tokenizer.ggml.tokens holds %d strings, want 1 to %d", len(tokens), VocabMax)
	}
	types, ok := m.Ints("tokenizer.ggml.token_type")
	if ok && len(types) != len(tokens) {
		return Marks{}, fmt.Errorf("tokenizer.ggml.token_type holds %d values for %d tokens", len(types), len(tokens))
	}
	whole := false
	var err error
	switch kind, _ := m.String("tokenizer.ggml.model"); kind {
	case "gpt2":
		whole, err = t.readGGUFBytes(m, tokens, types)
	case "llama":
		whole, err = true, t.readGGUFPieces(m, tokens, types)
	default:
		err = unsupported("tokenizer.ggml.model is %.40q, known are gpt2 and llama", kind)
	}
	if err != nil {
		return Marks{}, err
	}
	t.setAdded(addedOf(tokens, types))
	marks, err := readMarks(m, len(tokens), whole)
	if err != nil {
		return Marks{}, err
	}
	if marks.AddBOS && marks.BOS >= 0 {
		t.before = []uint32{uint32(marks.BOS)}
	}
	if marks.AddEOS && marks.EOS >= 0 {
		t.behind = []uint32{uint32(marks.EOS)}
	}
	return marks, nil
}

func typeAt(types []int64, i int) int64 {
	if types == nil {
		return typeNormal
	}
	return types[i]
}

func addedOf(tokens []string, types []int64) []Added {
	var added []Added
	for i, text := range tokens {
		if kind := typeAt(types, i); kind == typeControl || kind == typeUserDefined {
			added = append(added, Added{ID: uint32(i), Text: text, Special: kind == typeControl})
		}
	}
	return added
}

// readGGUFBytes reads a byte-level vocabulary.
func (t *Tokenizer) readGGUFBytes(m Metadata, tokens []string, types []int64) (whole bool, err error) {
	name, _ := m.String("tokenizer.ggml.pre")
	pre, ok := pres[name]
	if !ok {
		return false, unsupported("tokenizer.ggml.pre is %.40q, known are smollm, gpt-2, default, llama-bpe, qwen2, qwen35, deepseek-v3, deepseek-r1-qwen, gpt-4o, llama4 and tekken", name)
	}
	t.chain = pre.chain
	vocab := make(map[string]uint32, len(tokens))
	skip := map[uint32]bool{}
	for i, text := range tokens {
		if kind := typeAt(types, i); kind == typeControl || kind == typeUserDefined {
			skip[uint32(i)] = true
		}
		if old, dup := vocab[text]; !dup || skip[old] {
			vocab[text] = uint32(i)
		}
	}
	list, ok := m.Strings("tokenizer.ggml.merges")
	if !ok || len(list) > VocabMax {
		return false, fmt.Errorf("tokenizer.ggml.merges holds %d strings, want at most %d", len(list), VocabMax)
	}
	merges := make([][2]string, len(list))
	for rank, s := range list {
		// The separator is the first space behind the first character: no token of the alphabet contains one.
		a, b, ok := strings.Cut(s, " ")
		if !ok || a == "" || b == "" {
			return false, fmt.Errorf("merge %d is %.40q, want two tokens with a space between", rank, s)
		}
		merges[rank] = [2]string{a, b}
	}
	return pre.whole, t.setModel(vocab, merges, modelOptions{byteLevel: true, whole: pre.whole, skip: skip})
}

// readGGUFPieces reads a vocabulary of SentencePiece, which scores tokens instead of listing merges: of all pairs that
// make a token, that whose token has the highest score merges first.
func (t *Tokenizer) readGGUFPieces(m Metadata, tokens []string, types []int64) error {
	scores, ok := m.Floats("tokenizer.ggml.scores")
	if !ok || len(scores) != len(tokens) {
		return fmt.Errorf("tokenizer.ggml.scores holds %d values for %d tokens", len(scores), len(tokens))
	}
	vocab := make(map[string]uint32, len(tokens))
	var order []int
	unknown := ""
	for i, text := range tokens {
		switch kind := typeAt(types, i); kind {
		case typeControl:
			continue
		case typeUnknown:
			unknown = text
		case typeNormal, typeUserDefined:
			order = append(order, i)
		}
		if _, dup := vocab[text]; !dup {
			vocab[text] = uint32(i)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(scores[b], scores[a]) })
	var merges [][2]string
	for _, i := range order {
		for at, r := range tokens[i] {
			if at == 0 || r == utf8.RuneError {
				continue
			}
			left, right := tokens[i][:at], tokens[i][at:]
			if _, ok := vocab[left]; !ok {
				continue
			}
			if _, ok := vocab[right]; ok {
				merges = append(merges, [2]string{left, right})
			}
		}
	}
	if space, ok := m.Bool("tokenizer.ggml.add_space_prefix"); !ok || space {
		t.steps = append(t.steps, prependStep("▁"))
	}
	t.steps = append(t.steps, replaceStep(" ", "▁"))
	o := modelOptions{fallback: true, fuse: true}
	if unknown != "" {
		o.unknown = &unknown
	}
	return t.setModel(vocab, merges, o)
}

func readMarks(m Metadata, tokens int, addByDefault bool) (Marks, error) {
	marks := Marks{BOS: -1, EOS: -1, AddBOS: addByDefault}
	for _, mark := range []struct {
		key string
		at  *int32
		end bool
	}{
		{"tokenizer.ggml.bos_token_id", &marks.BOS, false},
		{"tokenizer.ggml.eos_token_id", &marks.EOS, true},
		{"tokenizer.ggml.eot_token_id", nil, true},
		{"tokenizer.ggml.eom_token_id", nil, true},
	} {
		v, ok := m.Uint(mark.key)
		if !ok {
			continue
		}
		if v >= uint64(tokens) {
			return Marks{}, fmt.Errorf("%s is %d, the vocabulary has %d tokens", mark.key, v, tokens)
		}
		id := int32(v)
		if mark.at != nil {
			*mark.at = id
		}
		if mark.end && !slices.Contains(marks.Ends, id) {
			marks.Ends = append(marks.Ends, id)
		}
	}
	if v, ok := m.Bool("tokenizer.ggml.add_bos_token"); ok {
		marks.AddBOS = v
	}
	marks.AddEOS, _ = m.Bool("tokenizer.ggml.add_eos_token")
	return marks, nil
}
