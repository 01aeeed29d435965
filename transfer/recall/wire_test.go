package recall

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"testing"

	"github.com/headrace/headrace/transfer/handshake"
	"github.com/headrace/headrace/transfer/ticket"
)

func sample() *Request {
	return &Request{Tickets: [][]byte{bytes.Repeat([]byte{1}, ticket.Size), bytes.Repeat([]byte{2}, ticket.Size)}, Reason: "client left"}
}

func TestRequestReadsBack(t *testing.T) {
	b := sample().Append(nil)
	for kind := range kindCount {
		r := sample()
		r.Kind = kind
		if got, err := ReadRequest(bytes.NewReader(r.Append(nil))); err != nil || !reflect.DeepEqual(got, r) {
			t.Errorf("%s: %+v, %v", kind, got, err)
		}
	}
	for n := range b {
		if _, err := ReadRequest(bytes.NewReader(b[:n])); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
	for at, v := range map[int]byte{0: 'X', 4: 2, 6: 0, 7: 1, 9: 3, 10: 1, 10 + 1: 1, 12: 1, 15: 1, len(b) - 1: 0xff} {
		bad := bytes.Clone(b)
		bad[at] = v
		if _, err := ReadRequest(bytes.NewReader(bad)); !errors.Is(err, handshake.ErrProtocol) {
			t.Errorf("byte %d is %#x: %v", at, v, err)
		}
	}
	r := sample()
	r.Kind = kindCount
	if _, err := ReadRequest(bytes.NewReader(r.Append(nil))); !errors.Is(err, handshake.ErrProtocol) {
		t.Errorf("an unknown kind: %v", err)
	}
}

func TestAnswerReadsBack(t *testing.T) {
	verdicts := []Verdict{Revoked, Absent}
	b := AppendAnswer(nil, verdicts)
	if got, err := readAnswer(bytes.NewReader(b), 2); err != nil || !reflect.DeepEqual(got, verdicts) {
		t.Errorf("%v, %v", got, err)
	}
	for at, v := range map[int]byte{0: 'X', 4: 2, 6: 1, 8: 0, 9: byte(verdictCount)} {
		bad := bytes.Clone(b)
		bad[at] = v
		if _, err := readAnswer(bytes.NewReader(bad), 2); !errors.Is(err, handshake.ErrProtocol) {
			t.Errorf("byte %d is %#x: %v", at, v, err)
		}
	}
}

func FuzzRequest(f *testing.F) {
	for kind := range kindCount {
		r := sample()
		r.Kind = kind
		f.Add(r.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ReadRequest(bytes.NewReader(b))
		if err != nil {
			return
		}
		if again := r.Append(nil); !bytes.Equal(again, b[:len(again)]) {
			t.Error("reading is not the inverse of writing")
		}
	})
}
