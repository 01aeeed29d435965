// Package tfevents writes the event files that TensorBoard reads: records framed as TensorFlow frames them, each an Event of its protobuf
// schema (tensorflow/core/util/event.proto, framework/summary.proto and lib/io/record_writer.h in TensorFlow's repository, whose field numbers
// are repeated here). It knows scalars and text, and nothing of what they mean.
package tfevents

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protowire"
)

// Scalar is a value of a series. Tags with slashes are shown in groups.
type Scalar struct {
	Tag   string
	Value float64 // kept as a float32
}

// Text is something said, shown beside the series.
type Text struct {
	Tag  string
	Said string
}

const (
	// version is what a file's first event says of its schema.
	version = "brain.Event:2"
	// maskDelta is added to checksums, as those of bytes that hold checksums are weak.
	maskDelta = 0xa282ead8
	// prefix makes TensorBoard take a file for one of events.
	prefix = "events.out.tfevents."

	// Fields of Event, Summary, Summary.Value, SummaryMetadata, its PluginData and TensorProto.
	eventWallTime, eventStep, eventVersion, eventSummary        = 1, 2, 3, 5
	summaryValue                                                = 1
	valueTag, valueSimple, valueTensor, valueMetadata           = 1, 2, 8, 9
	metadataPlugin, pluginName                                  = 1, 1
	tensorType, tensorShape, tensorString, typeString    uint64 = 1, 2, 8, 7
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Writer writes one file of events. It is used by one goroutine.
type Writer struct {
	file     *os.File
	buffered *bufio.Writer
	event    []byte
	summary  []byte
	value    []byte
}

// Create makes the file events.out.tfevents.NAME in a directory, which it makes too; one of that name is replaced. A directory is a run for
// TensorBoard, and its files continue each other by the time of their events.
func Create(dir, name string, wallSeconds float64) (*Writer, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of event files: %w", err)
	}
	file, err := os.Create(filepath.Join(dir, prefix+name))
	if err != nil {
		return nil, fmt.Errorf("create event file: %w", err)
	}
	w := &Writer{file: file, buffered: bufio.NewWriter(file)}
	w.begin(wallSeconds)
	w.event = protowire.AppendTag(w.event, eventVersion, protowire.BytesType)
	w.event = protowire.AppendString(w.event, version)
	if err := errors.Join(w.record(), w.buffered.Flush()); err != nil {
		file.Close()
		return nil, err
	}
	return w, nil
}

// Add writes an event: what was at a time, in seconds since 1970, which is a step of the run. Events reach the file with Flush or Close, or
// when many have come.
func (w *Writer) Add(wallSeconds float64, step int64, scalars []Scalar, texts []Text) error {
	w.summary = w.summary[:0]
	for _, s := range scalars {
		w.value = protowire.AppendTag(w.value[:0], valueTag, protowire.BytesType)
		w.value = protowire.AppendString(w.value, s.Tag)
		w.value = protowire.AppendTag(w.value, valueSimple, protowire.Fixed32Type)
		w.value = protowire.AppendFixed32(w.value, math.Float32bits(float32(s.Value)))
		w.addValue()
	}
	for _, t := range texts {
		w.value = protowire.AppendTag(w.value[:0], valueTag, protowire.BytesType)
		w.value = protowire.AppendString(w.value, t.Tag)
		var tensor, shape []byte
		tensor = protowire.AppendTag(tensor, protowire.Number(tensorType), protowire.VarintType)
		tensor = protowire.AppendVarint(tensor, typeString)
		tensor = protowire.AppendTag(tensor, protowire.Number(tensorShape), protowire.BytesType)
		tensor = protowire.AppendBytes(tensor, shape) // no dimensions: one string
		tensor = protowire.AppendTag(tensor, protowire.Number(tensorString), protowire.BytesType)
		tensor = protowire.AppendString(tensor, t.Said)
		w.value = protowire.AppendTag(w.value, valueTensor, protowire.BytesType)
		w.value = protowire.AppendBytes(w.value, tensor)
		plugin := protowire.AppendString(protowire.AppendTag(nil, pluginName, protowire.BytesType), "text")
		metadata := protowire.AppendBytes(protowire.AppendTag(nil, metadataPlugin, protowire.BytesType), plugin)
		w.value = protowire.AppendTag(w.value, valueMetadata, protowire.BytesType)
		w.value = protowire.AppendBytes(w.value, metadata)
		w.addValue()
	}
	w.begin(wallSeconds)
	w.event = protowire.AppendTag(w.event, eventStep, protowire.VarintType)
	w.event = protowire.AppendVarint(w.event, uint64(step))
	w.event = protowire.AppendTag(w.event, eventSummary, protowire.BytesType)
	w.event = protowire.AppendBytes(w.event, w.summary)
	return w.record()
}

func (w *Writer) addValue() {
	w.summary = protowire.AppendTag(w.summary, summaryValue, protowire.BytesType)
	w.summary = protowire.AppendBytes(w.summary, w.value)
}

func (w *Writer) begin(wallSeconds float64) {
	w.event = protowire.AppendTag(w.event[:0], eventWallTime, protowire.Fixed64Type)
	w.event = protowire.AppendFixed64(w.event, math.Float64bits(wallSeconds))
}

// record frames the event: its length, the length's checksum, the event, its checksum, all little endian.
func (w *Writer) record() error {
	var head [12]byte
	binary.LittleEndian.PutUint64(head[:8], uint64(len(w.event)))
	binary.LittleEndian.PutUint32(head[8:], checksum(head[:8]))
	tail := binary.LittleEndian.AppendUint32(nil, checksum(w.event))
	for _, part := range [][]byte{head[:], w.event, tail} {
		if _, err := w.buffered.Write(part); err != nil {
			return fmt.Errorf("write event file: %w", err)
		}
	}
	return nil
}

func checksum(b []byte) uint32 {
	c := crc32.Checksum(b, castagnoli)
	return (c>>15 | c<<17) + maskDelta
}

// Flush brings what was added to the file.
func (w *Writer) Flush() error {
	if err := w.buffered.Flush(); err != nil {
		return fmt.Errorf("write event file: %w", err)
	}
	return nil
}

// Close flushes and closes the file. It may be called again.
func (w *Writer) Close() error {
	if w.file == nil {
		return nil
	}
	err := errors.Join(w.Flush(), w.file.Close())
	w.file = nil
	return err
}
