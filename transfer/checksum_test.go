package transfer

import (
	"errors"
	"testing"
)

func TestParseChecksum(t *testing.T) {
	for in, want := range map[string]string{"off": "off", "always": "always", "sampled": "1/64", "1/1": "always", "1/8": "1/8", "1/1048576": "1/1048576"} {
		if c, err := ParseChecksum(in); err != nil || c.String() != want {
			t.Errorf("%q: %v, %v, want %s", in, c, err, want)
		}
	}
	for _, in := range []string{"", "on", "1/0", "1/-1", "2/3", "1/", "1/1048577", "64"} {
		if c, err := ParseChecksum(in); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v, %v", in, c, err)
		}
	}
}

func TestSumDoesNotSeeHowBytesAreCut(t *testing.T) {
	mem := make([]byte, 4096)
	for i := range mem {
		mem[i] = byte(i * 7)
	}
	whole, err := sumRuns(mem, []Run{{Src: 0, Dst: 0, Len: 4096}}, true)
	if err != nil || whole == 0 {
		t.Fatal(whole, err)
	}
	var runs []Run
	for at, n := uint64(0), uint64(1); at < 4096; at, n = at+n, min(n*2, 4096-at-n) {
		runs = append(runs, Run{Src: 4096 - at, Dst: at, Len: n})
	}
	if cut, err := sumRuns(mem, runs, false); err != nil || cut != whole {
		t.Errorf("%x, %v, want %x", cut, err, whole)
	}
	mem[77] ^= 1
	if other, _ := sumRuns(mem, runs, false); other == whole {
		t.Error("a changed bit goes unseen")
	}
}
