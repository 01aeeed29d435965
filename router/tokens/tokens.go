// Package tokens is how a prompt's token ids are handed around in the router: in parts that follow each other. Those that many
// prompts begin with are not copied for each, and carry what was computed of them. It knows neither who makes prompts nor what
// for.
package tokens

import "sync"

// Prompt is a prompt's token ids.
type Prompt struct {
	Parts []Part
	// Own is memory for ids that belong to nobody else: of a part that does not outlive the Prompt.
	Own []uint32
}

// Part is a stretch of a prompt's ids, not to be changed.
type Part struct {
	IDs []uint32
	// Memo, unless nil, has what was computed of the prompt up to some place within this part. Whoever has the same Memo has the
	// same parts before this one, and of this one as many ids as he has.
	Memo *Memo
}

// Len is how many ids there are.
func (p *Prompt) Len() int {
	n := 0
	for i := range p.Parts {
		n += len(p.Parts[i].IDs)
	}
	return n
}

// AppendTo appends all ids.
func (p *Prompt) AppendTo(dst []uint32) []uint32 {
	for i := range p.Parts {
		dst = append(dst, p.Parts[i].IDs...)
	}
	return dst
}

// Reset forgets the ids, and keeps the memory.
func (p *Prompt) Reset() {
	clear(p.Parts)
	p.Parts, p.Own = p.Parts[:0], p.Own[:0]
}

// A Memo has hashes of a few kinds.
const rowsMax = 2

// BytesPerToken is what a Memo may take for each token of its part, with hashes of MemoBlockMin tokens each or more.
const (
	BytesPerToken = 8 * rowsMax / MemoBlockMin
	MemoBlockMin  = 16
)

// Kind is what hashes are of: all that they depend on beside the tokens.
type Kind struct {
	Block       int // tokens
	Root, Extra uint64
}

// Memo remembers the hashes of a part's blocks, in order, as far as somebody has asked for them. The zero value is ready. It may
// be used by many goroutines.
type Memo struct {
	mu   sync.Mutex
	rows [rowsMax]row
	next int // to be replaced
}

type row struct {
	kind   Kind
	hashes []uint64
}

// Known returns what there is of a kind. It must not be changed.
func (m *Memo) Known(k Kind) []uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.rows {
		if r := &m.rows[i]; r.kind == k {
			return r.hashes[:len(r.hashes):len(r.hashes)]
		}
	}
	return nil
}

// Learn adds hashes behind the first n of a kind. They are dropped where others have come first.
func (m *Memo) Learn(k Kind, n int, hashes []uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.rows {
		if r := &m.rows[i]; r.kind == k {
			if n <= len(r.hashes) && len(r.hashes) < n+len(hashes) {
				r.hashes = append(r.hashes, hashes[len(r.hashes)-n:]...)
			}
			return
		}
	}
	if n == 0 {
		m.rows[m.next] = row{k, append([]uint64(nil), hashes...)}
		m.next = (m.next + 1) % rowsMax
	}
}
