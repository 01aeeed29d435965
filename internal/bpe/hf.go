package bpe

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/text/unicode/norm"
)

// part is a normalizer, pre-tokenizer or post-processor of tokenizer.json, with the members of all of their types.
type part struct {
	Type          string
	Normalizers   []part
	Pretokenizers []part
	Processors    []part

	Prepend  string
	Pattern  struct{ String, Regex *string }
	Content  string
	Behavior string
	Invert   bool

	IndividualDigits bool   `json:"individual_digits"`
	AddPrefixSpace   *bool  `json:"add_prefix_space"`
	UseRegex         *bool  `json:"use_regex"`
	PrependScheme    string `json:"prepend_scheme"`
	Replacement      string
	Split            *bool

	Single        []templatePiece
	SpecialTokens map[string]struct{ IDs []uint32 } `json:"special_tokens"`
	Sep, Cls      []any
}

type templatePiece struct {
	SpecialToken *struct{ ID string }
	Sequence     *struct{ ID string }
}

type fileJSON struct {
	Added []struct {
		ID         uint32
		Content    string
		SingleWord bool `json:"single_word"`
		Lstrip     bool
		Rstrip     bool
		Normalized bool
		Special    bool
	} `json:"added_tokens"`
	Normalizer    *part
	PreTokenizer  *part `json:"pre_tokenizer"`
	PostProcessor *part `json:"post_processor"`
	Model         struct {
		Type         string
		Dropout      *float64
		UnkToken     *string         `json:"unk_token"`
		Prefix       *string         `json:"continuing_subword_prefix"`
		Suffix       *string         `json:"end_of_word_suffix"`
		FuseUnk      bool            `json:"fuse_unk"`
		ByteFallback bool            `json:"byte_fallback"`
		IgnoreMerges bool            `json:"ignore_merges"`
		Vocab        json.RawMessage // an object for BPE, a list for others
		Merges       mergeList
	}
}

// mergeList reads merges of both forms: "a b", and ["a", "b"].
type mergeList [][2]string

// UnmarshalJSON implements json.Unmarshaler.
func (l *mergeList) UnmarshalJSON(b []byte) error {
	if json.Unmarshal(b, (*[][2]string)(l)) == nil {
		return nil
	}
	var list []string
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	*l = make(mergeList, len(list))
	for i, s := range list {
		left, right, ok := strings.Cut(s, " ")
		if !ok || left == "" || right == "" {
			return fmt.Errorf("merge %d is %.40q, want two tokens with a space between", i, s)
		}
		(*l)[i] = [2]string{left, right}
	}
	return nil
}

// FromJSON reads Hugging Face's tokenizer.json. Errors wrap ErrUnsupported where the file asks for what this package does
// not do; others mean that the file is broken.
func FromJSON(b []byte) (*Tokenizer, error) {
	var f fileJSON
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("read tokenizer.json: %w", err)
	}
	t := new(Tokenizer)
	if err := t.readJSON(&f); err != nil {
		return nil, fmt.Errorf("read tokenizer.json: %w", err)
	}
	return t, nil
}

func (t *Tokenizer) readJSON(f *fileJSON) error {
	byteLevel := false
	if f.Normalizer != nil {
		if err := t.addStep(f.Normalizer); err != nil {
			return err
		}
	}
	if f.PreTokenizer != nil {
		if err := t.addScanner(f.PreTokenizer, &byteLevel); err != nil {
			return err
		}
	}
	if err := t.readModel(f, byteLevel); err != nil {
		return err
	}
	tokens := make([]Added, 0, len(f.Added))
	for _, a := range f.Added {
		tokens = append(tokens, Added{ID: a.ID, Text: a.Content, LeftStrip: a.Lstrip, RightStrip: a.Rstrip,
			SingleWord: a.SingleWord, Normalized: a.Normalized, Special: a.Special})
	}
	t.setAdded(tokens)
	if f.PostProcessor != nil {
		return t.addMarks(f.PostProcessor)
	}
	return nil
}

func unsupported(format string, a ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, a...))
}

func (t *Tokenizer) addStep(p *part) error {
	switch p.Type {
	case "Sequence":
		for i := range p.Normalizers {
			if err := t.addStep(&p.Normalizers[i]); err != nil {
				return err
			}
		}
	case "NFC":
		t.steps = append(t.steps, unicodeStep(norm.NFC))
	case "NFD":
		t.steps = append(t.steps, unicodeStep(norm.NFD))
	case "NFKC":
		t.steps = append(t.steps, unicodeStep(norm.NFKC))
	case "NFKD":
		t.steps = append(t.steps, unicodeStep(norm.NFKD))
	case "Prepend":
		t.steps = append(t.steps, prependStep(p.Prepend))
	case "Replace":
		if p.Pattern.String == nil || *p.Pattern.String == "" {
			return unsupported("normalizer Replace of a regular expression")
		}
		t.steps = append(t.steps, replaceStep(*p.Pattern.String, p.Content))
	default:
		return unsupported("normalizer %.40q", p.Type)
	}
	return nil
}

func (t *Tokenizer) addScanner(p *part, byteLevel *bool) error {
	if *byteLevel {
		return unsupported("a pre-tokenizer behind ByteLevel")
	}
	if t.meta.mark != "" {
		return unsupported("a pre-tokenizer behind Metaspace")
	}
	switch p.Type {
	case "Sequence":
		for i := range p.Pretokenizers {
			if err := t.addScanner(&p.Pretokenizers[i], byteLevel); err != nil {
				return err
			}
		}
	case "ByteLevel":
		*byteLevel = true
		if p.AddPrefixSpace == nil || *p.AddPrefixSpace {
			if len(t.chain) > 0 {
				return unsupported("ByteLevel with add_prefix_space behind another pre-tokenizer")
			}
			t.addSpace = true
		}
		if p.UseRegex == nil || *p.UseRegex {
			t.chain = append(t.chain, scanGPT2)
		}
	case "Digits":
		if p.IndividualDigits {
			t.chain = append(t.chain, scanDigit)
		} else {
			t.chain = append(t.chain, scanNumber)
		}
	case "Split":
		s, err := splitScanner(p)
		if err != nil {
			return err
		}
		t.chain = append(t.chain, s)
	case "Metaspace":
		return t.addMetaspace(p)
	default:
		return unsupported("pre-tokenizer %.40q", p.Type)
	}
	return nil
}

func (t *Tokenizer) addMetaspace(p *part) error {
	if len(t.chain) > 0 || p.Replacement == "" {
		return unsupported("pre-tokenizer Metaspace behind another one, or without a replacement")
	}
	t.meta.mark = p.Replacement
	switch p.PrependScheme {
	case "never":
	case "first":
		t.meta.prefix = prefixFirst
	case "always", "":
		t.meta.prefix = prefixAlways
		if p.PrependScheme == "" && p.AddPrefixSpace != nil && !*p.AddPrefixSpace {
			t.meta.prefix = prefixNever
		}
	default:
		return unsupported("prepend_scheme %.40q", p.PrependScheme)
	}
	if p.Split == nil || *p.Split {
		t.chain = append(t.chain, scanMergedWithNext(p.Replacement))
	}
	return nil
}

func splitScanner(p *part) (scanner, error) {
	if p.Invert {
		return nil, unsupported("pre-tokenizer Split with invert")
	}
	if p.Pattern.Regex != nil {
		if p.Behavior != "Isolated" {
			return nil, unsupported("pre-tokenizer Split of a regular expression with behavior %.40q", p.Behavior)
		}
		return scannerOf(*p.Pattern.Regex)
	}
	if p.Pattern.String == nil || *p.Pattern.String == "" {
		return nil, unsupported("pre-tokenizer Split without a pattern")
	}
	switch p.Behavior {
	case "Isolated":
		return scanIsolated(*p.Pattern.String), nil
	case "MergedWithPrevious":
		return scanMergedWithPrevious(*p.Pattern.String), nil
	case "MergedWithNext":
		return scanMergedWithNext(*p.Pattern.String), nil
	}
	return nil, unsupported("pre-tokenizer Split with behavior %.40q", p.Behavior)
}

func (t *Tokenizer) readModel(f *fileJSON, byteLevel bool) error {
	m := &f.Model
	empty := func(s *string) bool { return s == nil || *s == "" }
	switch {
	case m.Type != "" && m.Type != "BPE":
		return unsupported("model %.40q", m.Type)
	case !empty(m.Prefix) || !empty(m.Suffix):
		return unsupported("continuing_subword_prefix or end_of_word_suffix")
	case m.Dropout != nil && *m.Dropout > 0:
		return unsupported("dropout")
	}
	var vocab map[string]uint32
	if err := json.Unmarshal(m.Vocab, &vocab); err != nil || len(vocab) == 0 || len(vocab) > VocabMax {
		return fmt.Errorf("model.vocab holds %d tokens, want an object of 1 to %d (%w)", len(vocab), VocabMax, err)
	}
	return t.setModel(vocab, m.Merges, modelOptions{
		byteLevel: byteLevel, unknown: m.UnkToken, fuse: m.FuseUnk, fallback: m.ByteFallback, whole: m.IgnoreMerges})
}

type modelOptions struct {
	byteLevel, fuse, fallback, whole bool
	unknown                          *string
	skip                             map[uint32]bool // ids that no text is encoded as
}

// setModel fills in the model from a vocabulary and merges as files write them.
func (t *Tokenizer) setModel(vocab map[string]uint32, merges [][2]string, o modelOptions) error {
	m := &t.model
	m.unknown, m.fuse = noToken, o.fuse
	if o.unknown != nil {
		if id, ok := vocab[*o.unknown]; ok {
			m.unknown = id
		}
	}
	for _, id := range vocab {
		if id == noToken {
			return fmt.Errorf("a token has the id %d", id)
		}
	}
	find := func(text string) (uint32, bool) { id, ok := vocab[text]; return id, ok }
	if err := m.addMerges(merges, find); err != nil {
		return err
	}
	texts := vocab
	if o.byteLevel {
		texts = make(map[string]uint32, len(vocab))
		for text, id := range vocab {
			if b, pure := FromAlphabet(text); pure && !o.skip[id] {
				texts[string(b)] = id
			}
		}
		m.setBytes(texts)
	} else if err := m.setCharacters(vocab, o.fallback); err != nil {
		return err
	}
	if o.whole {
		m.whole = texts
	}
	m.finish(texts, merges)
	return nil
}

// setAdded takes the added tokens.
func (t *Tokenizer) setAdded(tokens []Added) {
	var raw, normalized []Added
	w := new(workspace)
	for _, a := range tokens {
		if a.SingleWord {
			t.context = true
		}
		if a.Normalized {
			a.Text = strings.Clone(t.normalize(a.Text, w))
			normalized = append(normalized, a)
		} else {
			raw = append(raw, a)
		}
	}
	t.raw, t.normalized = newAddedSet(raw), newAddedSet(normalized)
}

// addMarks reads what the post-processor puts around a text.
func (t *Tokenizer) addMarks(p *part) error {
	switch p.Type {
	case "ByteLevel":
	case "Sequence":
		for i := range p.Processors {
			if err := t.addMarks(&p.Processors[i]); err != nil {
				return err
			}
		}
	case "TemplateProcessing":
		return t.addTemplate(p)
	case "BertProcessing", "RobertaProcessing":
		cls, okCls := pairID(p.Cls)
		sep, okSep := pairID(p.Sep)
		if !okCls || !okSep {
			return fmt.Errorf("post-processor %s without cls and sep", p.Type)
		}
		t.before, t.behind = append([]uint32{cls}, t.before...), append(t.behind, sep)
	default:
		return unsupported("post-processor %.40q", p.Type)
	}
	return nil
}

// pairID is the id of ["text", id].
func pairID(pair []any) (uint32, bool) {
	if len(pair) != 2 {
		return 0, false
	}
	id, ok := pair[1].(float64)
	return uint32(id), ok
}

func (t *Tokenizer) addTemplate(p *part) error {
	var before, behind []uint32
	seen := 0
	for _, piece := range p.Single {
		switch {
		case piece.Sequence != nil:
			seen++
		case piece.SpecialToken != nil:
			token, ok := p.SpecialTokens[piece.SpecialToken.ID]
			if !ok {
				return fmt.Errorf("post-processor names the token %.40q and does not list it", piece.SpecialToken.ID)
			}
			if seen == 0 {
				before = append(before, token.IDs...)
			} else {
				behind = append(behind, token.IDs...)
			}
		}
	}
	if seen != 1 {
		return unsupported("post-processor that uses a text %d times", seen)
	}
	t.before = slices.Concat(before, t.before)
	t.behind = slices.Concat(t.behind, behind)
	return nil
}
