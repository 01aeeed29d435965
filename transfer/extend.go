package transfer

import "fmt"

// AllLayers as a unit's layer means the range in every layer.
const AllLayers = 1<<32 - 1

// declared are the source blocks of a request, as far as its engine has them: an engine that computes a prompt in chunks
// takes blocks chunk by chunk.
type declared struct {
	ids  []uint32 // in the request's order; what a reader took of it stays as it is when it grows
	need uint32   // for all tokens
	seen map[uint32]struct{}
}

// complete says whether every token of the request has its block.
func (d *declared) complete() bool { return uint32(len(d.ids)) == d.need }

// extend appends blocks, or none.
func (d *declared) extend(more []uint32, limit uint32) error {
	if have := uint32(len(d.ids)); uint64(len(more)) > uint64(d.need-have) {
		return fmt.Errorf("%w: %d blocks more than the %d there are, the request takes %d", ErrInvalid, len(more), have, d.need)
	}
	if d.seen == nil {
		d.seen = make(map[uint32]struct{}, len(more))
	}
	for i, b := range more {
		_, twice := d.seen[b]
		if !twice && b < limit {
			d.seen[b] = struct{}{}
			continue
		}
		for _, undo := range more[:i] {
			delete(d.seen, undo)
		}
		if twice {
			return fmt.Errorf("%w: a block is listed twice (%d)", ErrInvalid, b)
		}
		return fmt.Errorf("%w: block %d, the region has %d", ErrInvalid, b, limit)
	}
	d.ids = append(d.ids, more...)
	if d.complete() {
		d.seen = nil
	}
	return nil
}

// Extend (P) appends blocks to those that Present gave, in the request's order. It may be called before EventBound.
func (c *Client) Extend(id LeaseID, blocks []uint32) error {
	l, err := c.source(id)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.living() {
		return ErrLeaseEnded
	}
	if len(blocks) == 0 {
		return fmt.Errorf("%w: no blocks to append", ErrInvalid)
	}
	return l.blocks.extend(blocks, l.regions[0].layout.Blocks)
}

// checkUnits says what is wrong with the units of a push, and how many unit ranges of one layer and region they are. Own are
// the regions of a member that pushes. l.mu is held.
func (l *sourceLease) checkUnits(units []Unit, own []uint32) (ranges int, err error) {
	blocks, layers := uint32(len(l.blocks.ids)), l.regions[0].layout.Layers
	for _, u := range units {
		if u.Layer >= layers && u.Layer != AllLayers || u.Count == 0 || u.First >= blocks || u.Count > blocks-u.First {
			if end := uint64(u.First) + uint64(u.Count); !l.blocks.complete() && end > uint64(blocks) {
				return 0, fmt.Errorf("%w: units %d+%d, the request has %d of its %d blocks so far: extend it first", ErrInvalid, u.First, u.Count, blocks, l.blocks.need)
			}
			return 0, fmt.Errorf("%w: units %d+%d of layer %d, the request has %d blocks and %d layers", ErrInvalid, u.First, u.Count, u.Layer, blocks, layers)
		}
		if own != nil && u.Shard != 0 {
			return 0, fmt.Errorf("%w: units of region number %d: a member pushes from its own, and says 0", ErrInvalid, u.Shard)
		}
		if u.Shard > uint32(len(l.regions)) {
			return 0, fmt.Errorf("%w: units of region number %d, the lease has %d", ErrInvalid, u.Shard, len(l.regions))
		}
		if ranges++; u.Layer == AllLayers {
			ranges += int(layers) - 1
		}
	}
	return ranges * max(1, len(own)), nil
}

// expand gives units of one layer, and of one of a member's regions, each.
func (l *sourceLease) expand(units []Unit, own []uint32, ranges int) []Unit {
	out := make([]Unit, 0, ranges)
	for _, u := range units {
		first, end := u.Layer, u.Layer+1
		if u.Layer == AllLayers {
			first, end = 0, l.regions[0].layout.Layers
		}
		for u.Layer = first; u.Layer < end; u.Layer++ {
			if own == nil {
				out = append(out, u)
			}
			for _, u.Shard = range own {
				out = append(out, u)
			}
		}
	}
	return out
}
