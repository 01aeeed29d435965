package ring

import "encoding/hex"

// Golden returns the beginning of the header and an entry of each kind in hex, for tests and for docs/protocol.md: of a
// ring with 256 submissions and 1024 completions; a push of lease 11 with sequence number 3, as in the example of PUSH; its
// completion, after two events; and its refusal with code 14.
func Golden() map[string]string {
	header := make([]byte, Size(256, 1024))
	if err := Init(header, 256, 1024); err != nil {
		panic(err) // the sizes above are right
	}
	var push, pushed, refused [EntrySize]byte
	s := Submission{Lease: 11, Seq: 3, Units: []Unit{{0, 0, 3, 0}, {1, 0, 2, 1}}}
	s.Put(&push)
	c := Completion{After: 2, Lease: 11, Seq: 3}
	for i := range c.Nonce {
		c.Nonce[i] = byte(0xa0 + i)
	}
	c.Put(&pushed)
	c = Completion{Status: 14, After: 2, Lease: 11, Seq: 3}
	c.Put(&refused)
	return map[string]string{
		"RING_HEADER": hex.EncodeToString(header[:EntrySize]), "RING_PUSH": hex.EncodeToString(push[:]),
		"RING_PUSHED": hex.EncodeToString(pushed[:]), "RING_REFUSED": hex.EncodeToString(refused[:]),
	}
}
