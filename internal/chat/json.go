package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// list is a Python list: an index below zero counts from the end. The library's own has that wrong for the first item.
type list []any

// GetItem implements exec.ItemGetter.
func (l list) GetItem(key any) (*exec.Value, bool) {
	i, ok := key.(int)
	if !ok {
		return exec.AsValue(nil), false
	}
	if i < 0 {
		i += len(l)
	}
	if i < 0 || i >= len(l) {
		return exec.AsValue(nil), false
	}
	return exec.ToValue(l[i]), true
}

// decode reads JSON into what templates work on. Objects keep their order, whole numbers stay whole.
func decode(b []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	v, err := decodeValue(d)
	if err != nil {
		return nil, fmt.Errorf("read JSON: %w", err)
	}
	if d.More() {
		return nil, errors.New("read JSON: more than one value")
	}
	return v, nil
}

func decodeValue(d *json.Decoder) (any, error) {
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch t := t.(type) {
	case json.Delim:
		if t == '[' {
			return decodeList(d)
		}
		return decodeDict(d)
	case json.Number:
		if n, err := strconv.Atoi(t.String()); err == nil {
			return n, nil
		}
		f, err := t.Float64()
		return f, err
	}
	return t, nil
}

func decodeList(d *json.Decoder) (any, error) {
	out := list{}
	for d.More() {
		v, err := decodeValue(d)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	_, err := d.Token()
	return out, err
}

func decodeDict(d *json.Decoder) (any, error) {
	out := exec.NewDict()
	at := map[string]int{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, err
		}
		v, err := decodeValue(d)
		if err != nil {
			return nil, err
		}
		name, _ := key.(string)
		if i, dup := at[name]; dup {
			out.Pairs[i].Value = exec.AsValue(v)
			continue
		}
		at[name] = len(out.Pairs)
		out.Pairs = append(out.Pairs, &exec.Pair{Key: exec.AsValue(name), Value: exec.AsValue(v)})
	}
	_, err := d.Token()
	return out, err
}

// filterToJSON is Python's json.dumps(value, ensure_ascii=False, indent=...), as transformers has it: nothing is
// escaped for HTML.
func filterToJSON(_ *exec.Evaluator, in *exec.Value, params *exec.VarArgs) *exec.Value {
	if in.IsError() {
		return in
	}
	w := jsonWriter{indent: -1}
	indent := params.KwArgs["indent"]
	if indent == nil && len(params.Args) > 0 {
		indent = params.Args[0]
	}
	if indent != nil && indent.IsInteger() {
		w.indent = max(0, min(indent.Integer(), 32))
	}
	if err := w.value(in, 0); err != nil {
		return exec.AsValue(err)
	}
	return exec.AsSafeValue(w.b.String())
}

const jsonDepthMax = 200

type jsonWriter struct {
	b      strings.Builder
	indent int // -1: on one line
}

func (w *jsonWriter) value(v *exec.Value, depth int) error {
	if depth > jsonDepthMax {
		return errors.New("tojson: nested too deep")
	}
	switch {
	case v == nil || v.IsNil():
		w.b.WriteString("null")
	case v.IsBool():
		w.b.WriteString(strconv.FormatBool(v.Bool()))
	case v.IsInteger():
		w.b.WriteString(strconv.Itoa(v.Integer()))
	case v.IsFloat():
		w.float(v.Float())
	case v.IsString():
		return w.str(v.String())
	case v.IsDict():
		return w.dict(v, depth)
	case v.IsList():
		return w.list(v, depth)
	default:
		return errors.New("tojson: not a JSON value")
	}
	return nil
}

func (w *jsonWriter) float(f float64) {
	switch {
	case math.IsNaN(f):
		w.b.WriteString("NaN")
	case math.IsInf(f, 0):
		w.b.WriteString(strings.TrimPrefix(strconv.FormatFloat(f, 'g', -1, 64), "+") + "inity")
	case f == math.Trunc(f) && math.Abs(f) < 1e16:
		w.b.WriteString(strconv.FormatFloat(f, 'f', 1, 64))
	case math.Abs(f) >= 1e-4 && math.Abs(f) < 1e16:
		w.b.WriteString(strconv.FormatFloat(f, 'f', -1, 64))
	default:
		w.b.WriteString(strconv.FormatFloat(f, 'e', -1, 64))
	}
}

func (w *jsonWriter) str(s string) error {
	w.b.WriteByte('"')
	for _, r := range s {
		switch r {
		case '"', '\\':
			w.b.WriteByte('\\')
			w.b.WriteRune(r)
		case '\n':
			w.b.WriteString(`\n`)
		case '\r':
			w.b.WriteString(`\r`)
		case '\t':
			w.b.WriteString(`\t`)
		case '\b':
			w.b.WriteString(`\b`)
		case '\f':
			w.b.WriteString(`\f`)
		default:
			if r < 0x20 {
				fmt.Fprintf(&w.b, `\u%04x`, r)
			} else {
				w.b.WriteRune(r)
			}
		}
	}
	w.b.WriteByte('"')
	return nil
}

func (w *jsonWriter) dict(v *exec.Value, depth int) error {
	i := 0
	var err error
	w.b.WriteByte('{')
	each(v, func(key string, value any) {
		if err != nil {
			return
		}
		w.separate(i, depth+1)
		i++
		_ = w.str(key)
		w.b.WriteString(": ")
		err = w.value(exec.ToValue(value), depth+1)
	})
	w.close(i, depth, '}')
	return err
}

func (w *jsonWriter) list(v *exec.Value, depth int) error {
	n := v.Len()
	w.b.WriteByte('[')
	for i := range n {
		w.separate(i, depth+1)
		if err := w.value(v.Index(i), depth+1); err != nil {
			return err
		}
	}
	w.close(n, depth, ']')
	return nil
}

func (w *jsonWriter) separate(i, depth int) {
	if i > 0 {
		w.b.WriteByte(',')
		if w.indent < 0 {
			w.b.WriteByte(' ')
		}
	}
	w.line(depth)
}

func (w *jsonWriter) close(n, depth int, c byte) {
	if n > 0 {
		w.line(depth)
	}
	w.b.WriteByte(c)
}

func (w *jsonWriter) line(depth int) {
	if w.indent >= 0 {
		w.b.WriteByte('\n')
		w.b.WriteString(strings.Repeat(" ", w.indent*depth))
	}
}

// strftime is Python's, for the fields that templates print. Others stay as they are.
func strftime(t time.Time, format string) string {
	t = t.UTC()
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		if layout, ok := strftimeFields[format[i]]; ok {
			b.WriteString(t.Format(layout))
		} else if format[i] == '%' {
			b.WriteByte('%')
		} else {
			b.WriteByte('%')
			b.WriteByte(format[i])
		}
	}
	return b.String()
}

var strftimeFields = map[byte]string{
	'Y': "2006", 'y': "06", 'm': "01", 'd': "02", 'e': "_2", 'b': "Jan", 'B': "January", 'a': "Mon", 'A': "Monday",
	'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'j': "002", 'Z': "UTC", 'z': "-0700", 'F': "2006-01-02", 'T': "15:04:05",
}
