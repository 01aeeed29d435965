package ticket

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"
)

var testKey = []byte("a cluster key of the tests")

func example() Ticket {
	t := Ticket{
		PNode: "node-a", DNode: "node-b", PEngine: "prefill-0", DEngine: "decode-0",
		Deadline: time.UnixMilli(1790000000123),
	}
	for i := range t.Nonce {
		t.Nonce[i] = byte(i + 1)
	}
	for i := range t.Fingerprint {
		t.Fingerprint[i] = byte(0xa0 + i)
	}
	return t
}

// The golden bytes hold the format still: a change here is a new version.
const golden = "4852544b01006001" + "0102030405060708090a0b0c0d0e0f10" +
	"a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebf" + "7b6c50c4a0010000"

// Computed by an independent implementation (Python hmac) over the same bytes.
const goldenMAC = "9c8f38a05ca7aca6500b8308e944345d43151c8e58cdb814ee0d60ba4ad02b84"

func TestMintIsGolden(t *testing.T) {
	b := Mint(testKey, example())
	if len(b) != Size {
		t.Fatalf("minted %d bytes, want %d", len(b), Size)
	}
	if got := hex.EncodeToString(b[:64]); got != golden {
		t.Errorf("head\n got %s\nwant %s", got, golden)
	}
	if got, want := string(b[64:71]), "\x06node-a"; got != want {
		t.Errorf("first id %q, want %q", got, want)
	}
	if got := hex.EncodeToString(b[320:]); got != goldenMAC {
		t.Errorf("mac %s, want %s", got, goldenMAC)
	}
}

func TestVerifyRoundTrip(t *testing.T) {
	want := example()
	got, err := Verify(testKey, Mint(testKey, want), want.Deadline.Add(-time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	if !got.Deadline.Equal(want.Deadline) {
		t.Errorf("deadline %v, want %v", got.Deadline, want.Deadline)
	}
	got.Deadline = want.Deadline
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestVerifyRefuses(t *testing.T) {
	ex := example()
	now := ex.Deadline.Add(-time.Second)
	good := Mint(testKey, ex)
	t.Run("expired", func(t *testing.T) {
		if _, err := Verify(testKey, good, ex.Deadline); !errors.Is(err, ErrExpired) {
			t.Errorf("got %v, want ErrExpired", err)
		}
	})
	t.Run("other key", func(t *testing.T) {
		if _, err := Verify([]byte("another"), good, now); !errors.Is(err, ErrBadMAC) {
			t.Errorf("got %v, want ErrBadMAC", err)
		}
	})
	t.Run("every flipped byte", func(t *testing.T) {
		for i := range good {
			b := bytes.Clone(good)
			b[i] ^= 0x40
			if _, err := Verify(testKey, b, now); !errors.Is(err, ErrBadMAC) {
				t.Fatalf("byte %d flipped: got %v, want ErrBadMAC", i, err)
			}
		}
	})
	t.Run("every shorter length", func(t *testing.T) {
		for n := range good {
			if _, err := Verify(testKey, good[:n], now); !errors.Is(err, ErrMalformed) {
				t.Fatalf("%d bytes: got %v, want ErrMalformed", n, err)
			}
		}
	})
}

func TestMintRefusesWhatItCannotEncode(t *testing.T) {
	for name, change := range map[string]func(*Ticket){
		"empty id":   func(t *Ticket) { t.PNode = "" },
		"long id":    func(t *Ticket) { t.DEngine = strings.Repeat("x", IDMax+1) },
		"zero nonce": func(t *Ticket) { t.Nonce = [16]byte{} },
		"control":    func(t *Ticket) { t.DNode = "a\nb" },
		"deadline":   func(t *Ticket) { t.Deadline = time.Time{} },
	} {
		x := example()
		change(&x)
		if Mint(testKey, x) != nil {
			t.Errorf("%s: minted", name)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(Mint(testKey, example()))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := Decode(b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Errorf("untyped error %v", err)
			}
			return
		}
		again := Mint(testKey, x)
		if !bytes.Equal(again[:macStart], b[:macStart]) {
			t.Errorf("decoding is not the inverse of encoding")
		}
	})
}
