// Package snapfile reads the YAML form of a snapshot (docs/scheduling.md). It is strict: an unknown field, a name given
// twice, a negative amount or a reference to nothing is an error with its line and what to do. It reads bytes, not
// files, and decides nothing.
package snapfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/headrace/headrace/scheduler/cluster"
)

// Error holds every problem that was found, in the order of the file.
type Error struct{ Problems []string }

// Error is one line a problem.
func (e *Error) Error() string { return strings.Join(e.Problems, "\n") }

// Parse reads a snapshot and checks it.
//
// Claims' File is left for the caller: this package opens nothing.
func Parse(text []byte) (*cluster.Snapshot, error) {
	if len(text) > fileBytesMax {
		return nil, &Error{[]string{fmt.Sprintf("line 1: %d bytes are more than the %d a snapshot may have; divide it", len(text), fileBytesMax)}}
	}
	node, err := document(text)
	if err != nil {
		return nil, err
	}
	d := &decoder{}
	s := &cluster.Snapshot{}
	if node != nil {
		d.value(node, reflect.ValueOf(s).Elem(), "", 0)
	}
	if len(d.problems) == 0 {
		bounds(d, s)
	}
	if len(d.problems) == 0 {
		s.Normalize()
		check(d, s)
	}
	if len(d.problems) > 0 {
		return nil, &Error{d.problems}
	}
	return s, nil
}

// document is the root of the only document; nil where there is none.
func document(text []byte) (*yaml.Node, error) {
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc, second yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, &Error{[]string{strings.TrimPrefix(err.Error(), "yaml: ")}}
	}
	if err := dec.Decode(&second); !errors.Is(err, io.EOF) {
		return nil, &Error{[]string{"more than one YAML document; write one snapshot a file"}}
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil, nil
	}
	return root, nil
}

// gpusMax is how many devices one host may have.
const gpusMax = cluster.GPUsMax
