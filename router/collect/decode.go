package collect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/cespare/xxhash/v2"
	"github.com/tinylib/msgp/msgp"
)

// Batches are msgpack, [time, events, rank]. Engines write batches and events as arrays or, newer ones, as maps, and leave
// out fields that have their defaults: both are read at both levels, in any order, and what is not known is skipped.

// decoder reads batches. Its memory is used again, so that reading makes no garbage.
type decoder struct {
	ev      event
	ignored uint64 // events of kinds that are not known
}

// Decoder reads batches of KV events that came some other way than over a Collector's connections. It is not safe for
// concurrent use.
type Decoder struct{ d decoder }

// Batch gives the events of one batch to sink, up to the one that cannot be read.
func (d *Decoder) Batch(b []byte, s Source, sink Sink) error { return d.d.batch(b, s, sink) }

// event is the union of all kinds.
type event struct {
	kind    kind
	stored  Stored
	removed Removed
}

type kind uint8

const (
	kindOther kind = iota
	kindStored
	kindRemoved
	kindCleared
)

func kindOf(name []byte) kind {
	switch string(name) {
	case "BlockStored":
		return kindStored
	case "BlockRemoved":
		return kindRemoved
	case "AllBlocksCleared":
		return kindCleared
	}
	return kindOther
}

type field uint8

const (
	fieldOther field = iota
	fieldHashes
	fieldParent
	fieldTokens
	fieldSize
	fieldLoRAID
	fieldMedium
	fieldLoRA
	fieldExtra
	fieldGroup
	fieldSpec
)

func fieldOf(name []byte) field {
	switch string(name) {
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldSize
	case "lora_id":
		return fieldLoRAID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoRA
	case "extra_keys":
		return fieldExtra
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldSpec
	}
	return fieldOther
}

// Fields by position behind the kind, in arrays.
var (
	storedFields  = []field{fieldHashes, fieldParent, fieldTokens, fieldSize, fieldLoRAID, fieldMedium, fieldLoRA, fieldExtra, fieldGroup, fieldSpec}
	removedFields = []field{fieldHashes, fieldMedium, fieldGroup}
)

// nestingMax is how deep values that are skipped may be nested.
const nestingMax = 32

// batch reads one batch and gives its events to sink, up to the one that cannot be read.
func (d *decoder) batch(b []byte, s Source, sink Sink) error {
	found := false
	err := eachField(b, nil, func(i int, name, v []byte) ([]byte, error) {
		if name == nil && i == 1 || string(name) == "events" {
			found = true
			return d.events(v, s, sink)
		}
		return skip(v)
	})
	if err == nil && !found {
		err = errors.New("it has no events")
	}
	if err != nil {
		return fmt.Errorf("read KV events: %w", err)
	}
	return nil
}

func (d *decoder) events(b []byte, s Source, sink Sink) ([]byte, error) {
	n, b, err := header(b, msgp.ReadArrayHeaderBytes)
	if err != nil {
		return nil, err
	}
	for range n {
		if b, err = d.event(b); err != nil {
			return nil, err
		}
		switch d.ev.kind {
		case kindStored:
			if err := d.ev.stored.check(); err != nil {
				return nil, err
			}
			sink.Stored(s, &d.ev.stored)
		case kindRemoved:
			sink.Removed(s, &d.ev.removed)
		case kindCleared:
			sink.Cleared(s)
		default:
			d.ignored++
		}
	}
	return b, nil
}

func (b *Stored) check() error {
	if len(b.Keys) == 0 {
		return nil
	}
	if b.BlockTokens == 0 {
		return errors.New("blocks without a size")
	}
	return nil
}

// event reads one event into d.ev.
func (d *decoder) event(b []byte) ([]byte, error) {
	e := &d.ev
	e.kind = kindOther
	st, rm := &e.stored, &e.removed
	*st = Stored{Keys: st.Keys[:0], Tokens: st.Tokens[:0], Extra: st.Extra[:0], LoRAID: -1}
	*rm = Removed{Keys: rm.Keys[:0]}
	if len(b) > 0 && msgp.NextType(b) == msgp.MapType {
		return d.eventMap(b)
	}
	var fields []field
	var rest []byte
	err := eachField(b, &rest, func(i int, _, v []byte) ([]byte, error) {
		if i == 0 {
			name, rest, err := msgp.ReadStringZC(v)
			e.kind = kindOf(name)
			switch e.kind {
			case kindStored:
				fields = storedFields
			case kindRemoved:
				fields = removedFields
			}
			return rest, err
		}
		if i-1 >= len(fields) {
			return skip(v)
		}
		return d.field(fields[i-1], v)
	})
	return rest, err
}

// eventMap reads an event that names its fields. Its kind may stand behind them.
func (d *decoder) eventMap(b []byte) ([]byte, error) {
	e := &d.ev
	body := b
	rest, err := skipTo(b, "type", &e.kind)
	if err != nil || e.kind == kindOther || e.kind == kindCleared {
		return rest, err
	}
	err = eachField(body, &rest, func(_ int, name, v []byte) ([]byte, error) { return d.field(fieldOf(name), v) })
	return rest, err
}

// skipTo skips a map and notes the kind that stands under a name.
func skipTo(b []byte, want string, k *kind) (rest []byte, err error) {
	err = eachField(b, &rest, func(_ int, name, v []byte) ([]byte, error) {
		if string(name) == want && len(v) > 0 && msgp.NextType(v) == msgp.StrType {
			text, rest, err := msgp.ReadStringZC(v)
			*k = kindOf(text)
			return rest, err
		}
		return skip(v)
	})
	return rest, err
}

// field reads one field of d.ev.
func (d *decoder) field(f field, v []byte) (rest []byte, err error) {
	st, rm := &d.ev.stored, &d.ev.removed
	if len(v) > 0 && msgp.IsNil(v) {
		return v[1:], nil
	}
	switch f {
	case fieldHashes:
		if d.ev.kind == kindRemoved {
			rm.Keys, rest, err = keys(v, rm.Keys)
		} else {
			st.Keys, rest, err = keys(v, st.Keys)
		}
	case fieldParent:
		st.Parent, rest, err = key(v)
		st.HasParent = err == nil
	case fieldTokens:
		st.Tokens, rest, err = tokens(v, st.Tokens)
	case fieldSize:
		st.BlockTokens, rest, err = msgp.ReadUint32Bytes(v)
	case fieldLoRAID:
		st.LoRAID, rest, err = msgp.ReadInt64Bytes(v)
	case fieldLoRA:
		st.LoRA, rest, err = msgp.ReadStringBytes(v)
	case fieldMedium:
		var m string
		m, rest, err = mediumName(v)
		st.Medium, rm.Medium = m, m
	case fieldGroup:
		var g uint16
		g, rest, err = msgp.ReadUint16Bytes(v)
		st.Group, rm.Group = g, g
	case fieldSpec:
		var name []byte
		name, rest, err = msgp.ReadStringZC(v)
		st.Spec = specName(name)
	case fieldExtra:
		st.Extra, rest, err = raws(v, st.Extra)
	default:
		return skip(v)
	}
	if err != nil {
		return nil, fmt.Errorf("field %d: %w", f, err)
	}
	return rest, nil
}

// specName does not copy the name that most have.
func specName(name []byte) string {
	if string(name) == "full_attention" {
		return "full_attention"
	}
	return string(name)
}

// mediumName does not copy the names that there are.
func mediumName(v []byte) (string, []byte, error) {
	name, rest, err := msgp.ReadStringZC(v)
	switch string(name) {
	case "GPU":
		return "GPU", rest, err
	case "CPU":
		return "CPU", rest, err
	case "STORAGE":
		return "STORAGE", rest, err
	}
	return string(name), rest, err
}

// header reads an array's or a map's length, which cannot be more than there are bytes.
func header(b []byte, read func([]byte) (uint32, []byte, error)) (int, []byte, error) {
	n, rest, err := read(b)
	if err != nil {
		return 0, nil, err
	}
	if uint64(n) > uint64(len(rest)) {
		return 0, nil, msgp.ErrShortBytes
	}
	return int(n), rest, nil
}

// eachField calls f with each element of an array (name is nil), or value of a map, and all that follows; f returns what is behind it.
func eachField(b []byte, rest *[]byte, f func(i int, name, v []byte) ([]byte, error)) error {
	isMap := len(b) > 0 && msgp.NextType(b) == msgp.MapType
	read := msgp.ReadArrayHeaderBytes
	if isMap {
		read = msgp.ReadMapHeaderBytes
	}
	n, b, err := header(b, read)
	if err != nil {
		return err
	}
	for i := range n {
		var name []byte
		if isMap {
			if name, b, err = msgp.ReadStringZC(b); err != nil {
				return err
			}
		}
		if b, err = f(i, name, b); err != nil {
			return err
		}
	}
	if rest != nil {
		*rest = b
	}
	return nil
}

// keys reads block hashes.
func keys(b []byte, into []Key) ([]Key, []byte, error) {
	n, b, err := header(b, msgp.ReadArrayHeaderBytes)
	for i := 0; i < n && err == nil; i++ {
		var k Key
		if k, b, err = key(b); err == nil {
			into = append(into, k)
		}
	}
	return into, b, err
}

// key reads a block hash: an integer, or the bytes of a digest, of which engines that send integers send the last eight.
func key(b []byte) (Key, []byte, error) {
	if len(b) == 0 {
		return 0, nil, msgp.ErrShortBytes
	}
	switch msgp.NextType(b) {
	case msgp.IntType:
		v, rest, err := msgp.ReadInt64Bytes(b)
		return Key(v), rest, err
	case msgp.UintType:
		v, rest, err := msgp.ReadUint64Bytes(b)
		return Key(v), rest, err
	case msgp.BinType:
		v, rest, err := msgp.ReadBytesZC(b)
		if len(v) >= 8 {
			return Key(binary.BigEndian.Uint64(v[len(v)-8:])), rest, err
		}
		return Key(xxhash.Sum64(v)), rest, err
	case msgp.StrType:
		v, rest, err := msgp.ReadStringZC(b)
		return Key(xxhash.Sum64(v)), rest, err
	}
	return 0, nil, fmt.Errorf("a block hash that is a %s", msgp.NextType(b))
}

// tokens reads token ids. Where an engine sends something else in their place there are none.
func tokens(b []byte, into []uint32) ([]uint32, []byte, error) {
	n, rest, err := header(b, msgp.ReadArrayHeaderBytes)
	if err != nil {
		return into, nil, err
	}
	for range n {
		v, r, err := msgp.ReadInt64Bytes(rest)
		if err != nil || v < 0 || v > math.MaxUint32 {
			r, err = skip(b)
			return into[:0], r, err
		}
		into, rest = append(into, uint32(v)), r
	}
	return into, rest, nil
}

// raws reads an array's elements as they are.
func raws(b []byte, into [][]byte) ([][]byte, []byte, error) {
	n, b, err := header(b, msgp.ReadArrayHeaderBytes)
	for i := 0; i < n && err == nil; i++ {
		var rest []byte
		if rest, err = skip(b); err != nil {
			break
		}
		v := b[: len(b)-len(rest) : len(b)-len(rest)]
		if msgp.IsNil(v) {
			v = nil
		}
		into, b = append(into, v), rest
	}
	return into, b, err
}

// skip steps over a value. Unlike msgp.Skip it bounds how deep it goes.
func skip(b []byte) ([]byte, error) { return skipNested(b, nestingMax) }

func skipNested(b []byte, left int) ([]byte, error) {
	if len(b) == 0 {
		return nil, msgp.ErrShortBytes
	}
	var n int
	var err error
	switch msgp.NextType(b) {
	case msgp.ArrayType:
		n, b, err = header(b, msgp.ReadArrayHeaderBytes)
	case msgp.MapType:
		n, b, err = header(b, msgp.ReadMapHeaderBytes)
		n *= 2
	default:
		return msgp.Skip(b)
	}
	if err != nil {
		return nil, err
	}
	if left == 0 {
		return nil, errors.New("nested too deep")
	}
	for range n {
		if b, err = skipNested(b, left-1); err != nil {
			return nil, err
		}
	}
	return b, nil
}
