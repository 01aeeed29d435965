package snapfile

import (
	"encoding"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Limits of what is read.
const (
	fileBytesMax = 64 << 20
	depthMax     = 24
	problemsMax  = 20
	floatMax     = 1e15 // sums of such numbers stay finite
)

// decoder fills structs from YAML nodes and collects every problem with its line.
type decoder struct {
	problems []string
}

func (d *decoder) problem(line int, format string, a ...any) {
	if len(d.problems) < problemsMax {
		d.problems = append(d.problems, fmt.Sprintf("line %d: ", line)+fmt.Sprintf(format, a...))
	}
}

// value fills v from n. where names the field for messages.
func (d *decoder) value(n *yaml.Node, v reflect.Value, where string, depth int) {
	if depth > depthMax {
		d.problem(n.Line, "%s: nested deeper than %d levels", where, depthMax)
		return
	}
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		d.problem(n.Line, "%s: anchors and aliases are not read; write the value out", where)
		return
	}
	if v.Kind() == reflect.Pointer {
		if n.Tag == "!!null" {
			return
		}
		v.Set(reflect.New(v.Type().Elem()))
		d.value(n, v.Elem(), where, depth)
		return
	}
	if text, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		if d.scalar(n, where) {
			if err := text.UnmarshalText([]byte(n.Value)); err != nil {
				d.problem(n.Line, "%s: %v", where, err)
			}
		}
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.structure(n, v, where, depth)
	case reflect.Slice:
		d.slice(n, v, where, depth)
	case reflect.Map:
		d.mapping(n, v, where, depth)
	default:
		if d.scalar(n, where) {
			d.plain(n, v, where)
		}
	}
}

func (d *decoder) scalar(n *yaml.Node, where string) bool {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		d.problem(n.Line, "%s: write one value here, not %s", where, kindName(n))
		return false
	}
	return true
}

func kindName(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Tag == "!!null":
		return "nothing"
	}
	return "the text " + strconv.Quote(n.Value)
}

// plain reads strings, numbers and truth values. No number may be negative but those that the field's type allows.
func (d *decoder) plain(n *yaml.Node, v reflect.Value, where string) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(n.Value)
	case reflect.Bool:
		if n.Value != "true" && n.Value != "false" {
			d.problem(n.Line, "%s: %q is neither true nor false", where, n.Value)
			return
		}
		v.SetBool(n.Value == "true")
	case reflect.Int, reflect.Int64:
		i, err := strconv.ParseInt(n.Value, 10, v.Type().Bits())
		if err != nil {
			d.problem(n.Line, "%s: %q is not a whole number", where, n.Value)
			return
		}
		v.SetInt(i)
	case reflect.Float64:
		f, err := strconv.ParseFloat(n.Value, 64)
		if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			d.problem(n.Line, "%s: %q is not a number", where, n.Value)
			return
		}
		if math.Abs(f) > floatMax {
			d.problem(n.Line, "%s: %s is out of range; write at most %g", where, n.Value, float64(floatMax))
			return
		}
		v.SetFloat(f)
	default:
		panic("snapfile: no rule for a field of type " + v.Type().String())
	}
}

func (d *decoder) structure(n *yaml.Node, v reflect.Value, where string, depth int) {
	if n.Kind != yaml.MappingNode {
		d.problem(n.Line, "%swrite a mapping (name: value) here, not %s", prefix(where), kindName(n))
		return
	}
	if line := v.FieldByName("Line"); line.IsValid() {
		line.SetInt(int64(n.Line))
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if !d.key(key, seen, where) {
			continue
		}
		f, ok := fieldOf(v.Type(), key.Value)
		if !ok {
			d.problem(key.Line, "%sunknown field %q%s", prefix(where), key.Value, meant(v.Type(), key.Value))
			continue
		}
		name := key.Value
		if where != "" {
			name = where + "." + key.Value
		}
		d.value(value, v.FieldByIndex(f.Index), name, depth+1)
		d.inRange(value, v.FieldByIndex(f.Index), f, name)
	}
}

func prefix(where string) string {
	if where == "" {
		return ""
	}
	return where + ": "
}

// key refuses keys that are not plain words and those given twice.
func (d *decoder) key(key *yaml.Node, seen map[string]int, where string) bool {
	if key.Kind != yaml.ScalarNode || key.Anchor != "" {
		d.problem(key.Line, "%sa key is a plain word", prefix(where))
		return false
	}
	if first := seen[key.Value]; first > 0 {
		d.problem(key.Line, "%s%q stands already on line %d; remove one of them", prefix(where), key.Value, first)
		return false
	}
	seen[key.Value] = key.Line
	return true
}

// inRange checks a field's enum tag and that numbers are not negative.
func (d *decoder) inRange(n *yaml.Node, v reflect.Value, f reflect.StructField, where string) {
	if allowed := f.Tag.Get("enum"); allowed != "" && n.Kind == yaml.ScalarNode && !slices.Contains(strings.Split(allowed, ","), n.Value) {
		d.problem(n.Line, "%s: %q is none of %s", where, n.Value, strings.ReplaceAll(allowed, ",", ", "))
	}
	if v.Kind() == reflect.Pointer && !v.IsNil() {
		v = v.Elem()
	}
	if f.Tag.Get("sign") == "any" {
		return
	}
	if v.CanInt() && v.Int() < 0 || v.CanFloat() && v.Float() < 0 {
		d.problem(n.Line, "%s: %s is negative; write 0 or more", where, n.Value)
	}
}

func (d *decoder) slice(n *yaml.Node, v reflect.Value, where string, depth int) {
	if n.Tag == "!!null" {
		return
	}
	if n.Kind != yaml.SequenceNode {
		d.problem(n.Line, "%s: write a list here, not %s", where, kindName(n))
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
	for i, item := range n.Content {
		d.value(item, v.Index(i), fmt.Sprintf("%s[%d]", where, i), depth+1)
		if e := v.Index(i); e.CanInt() && e.Int() < 0 {
			d.problem(item.Line, "%s[%d]: %s is negative; write 0 or more", where, i, item.Value)
		}
	}
}

func (d *decoder) mapping(n *yaml.Node, v reflect.Value, where string, depth int) {
	if n.Tag == "!!null" {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.problem(n.Line, "%swrite a mapping (name: value) here, not %s", prefix(where), kindName(n))
		return
	}
	v.Set(reflect.MakeMap(v.Type()))
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, item := n.Content[i], n.Content[i+1]
		if !d.key(key, seen, where) {
			continue
		}
		e := reflect.New(v.Type().Elem()).Elem()
		d.value(item, e, where+"."+key.Value, depth+1)
		if e.CanInt() && e.Int() < 0 || e.CanFloat() && e.Float() < 0 {
			d.problem(item.Line, "%s.%s: %s is negative; write 0 or more", where, key.Value, item.Value)
		}
		v.SetMapIndex(reflect.ValueOf(key.Value), e)
	}
}

// fieldOf finds the field of a YAML name.
func fieldOf(t reflect.Type, name string) (reflect.StructField, bool) {
	for _, f := range reflect.VisibleFields(t) {
		if tag := f.Tag.Get("yaml"); tag == name && tag != "-" && tag != "" {
			return f, true
		}
	}
	return reflect.StructField{}, false
}

// meant names the field that was probably wanted, or all there are.
func meant(t reflect.Type, name string) string {
	var names []string
	best, distance := "", 3
	for _, f := range reflect.VisibleFields(t) {
		tag := f.Tag.Get("yaml")
		if tag == "" || tag == "-" {
			continue
		}
		names = append(names, tag)
		if n := edits(tag, name, distance); n < distance {
			best, distance = tag, n
		}
	}
	if best != "" {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	return "; there are " + strings.Join(names, ", ")
}

// edits is the number of letters to add, remove or change to make b of a; at most limit.
func edits(a, b string, limit int) int {
	if len(a)-len(b) >= limit || len(b)-len(a) >= limit {
		return limit
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return min(row[len(b)], limit)
}
