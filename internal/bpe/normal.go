package bpe

import (
	"strings"
	"unsafe"

	"golang.org/x/text/unicode/norm"
)

// A step is one normalizer: it appends what text becomes to buf, or says that it changes nothing.
type step func(buf []byte, text string) (out []byte, changed bool)

// unicodeStep normalizes to a form of Unicode.
func unicodeStep(form norm.Form) step {
	return func(buf []byte, text string) ([]byte, bool) {
		if form.QuickSpanString(text) == len(text) {
			return buf, false
		}
		return form.AppendString(buf, text), true
	}
}

// prependStep puts prefix before text that is not empty.
func prependStep(prefix string) step {
	return func(buf []byte, text string) ([]byte, bool) {
		if text == "" {
			return buf, false
		}
		return append(append(buf, prefix...), text...), true
	}
}

// replaceStep replaces a string.
func replaceStep(pattern, with string) step {
	return func(buf []byte, text string) ([]byte, bool) {
		i := strings.Index(text, pattern)
		if i < 0 {
			return buf, false
		}
		for i >= 0 {
			buf = append(append(buf, text[:i]...), with...)
			text = text[i+len(pattern):]
			i = strings.Index(text, pattern)
		}
		return append(buf, text...), true
	}
}

// view is b as a string. b must not change while it is in use.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// normalize returns the normalized text. It lies in w.text until the next call; w.spare is free.
func (t *Tokenizer) normalize(text string, w *workspace) string {
	for _, s := range t.steps {
		if out, changed := s(w.spare[:0], text); changed {
			text = view(out)
			w.text, w.spare = out, w.text // the next step reads the one and writes the other
		}
	}
	return text
}
