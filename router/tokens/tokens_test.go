package tokens

import (
	"slices"
	"testing"
)

func TestMemo(t *testing.T) {
	var m Memo
	a, b, c := Kind{Block: 16, Root: 1}, Kind{Block: 16, Root: 2}, Kind{Block: 16, Root: 1, Extra: 3}
	is := func(k Kind, want ...uint64) {
		t.Helper()
		if got := m.Known(k); !slices.Equal(got, want) {
			t.Errorf("%+v: %v, want %v", k, got, want)
		}
	}
	m.Learn(a, 1, []uint64{2}) // what comes before is not there
	is(a)
	m.Learn(a, 0, []uint64{1, 2})
	known := m.Known(a)
	m.Learn(a, 0, []uint64{1, 2}) // another request came second
	m.Learn(a, 1, []uint64{2, 3, 4})
	m.Learn(a, 5, []uint64{6})
	is(a, 1, 2, 3, 4)
	if _ = append(known, 9); !slices.Equal(m.Known(a), []uint64{1, 2, 3, 4}) {
		t.Error("who knows some can change what follows")
	}
	m.Learn(b, 0, []uint64{7})
	is(a, 1, 2, 3, 4)
	is(b, 7)
	m.Learn(c, 0, []uint64{8}) // the third takes the place of the first
	is(a)
	is(b, 7)
	is(c, 8)
}

func TestPrompt(t *testing.T) {
	p := Prompt{Parts: []Part{{IDs: []uint32{1, 2}}, {}, {IDs: []uint32{3}}}}
	if got := p.AppendTo(nil); p.Len() != 3 || !slices.Equal(got, []uint32{1, 2, 3}) {
		t.Errorf("%d: %v", p.Len(), got)
	}
	if p.Reset(); p.Len() != 0 {
		t.Error("not empty")
	}
}
