package hostmem

import (
	"math"
	"strings"
	"testing"
)

func TestLimitIsOfThisHost(t *testing.T) {
	limit, source := Limit()
	if limit < 64<<20 || limit > 1<<50 || source == "" {
		t.Errorf("%d bytes by %q", limit, source)
	}
	if err := Check("KV cache", limit, "--kv-memory"); err != nil {
		t.Error(err)
	}
	if err := Check("KV cache", math.MaxUint64, "--kv-memory"); err == nil || !strings.Contains(err.Error(), source) {
		t.Errorf("all there could be: %v", err)
	}
}

func TestCheck(t *testing.T) {
	err := check("KV cache", 2<<30, "--kv-memory", 1<<30, "the memory limit of its control group")
	const want = "KV cache of 2.0 GiB does not fit: the memory limit of its control group is 1.0 GiB; give a smaller --kv-memory"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if err := check("KV cache", 2<<30, "--kv-memory", 0, ""); err != nil {
		t.Errorf("no limit is known: %v", err)
	}
}

func TestAvailable(t *testing.T) {
	limit, _ := Limit()
	if n := Available(); n == 0 || limit > 0 && n > 1<<50 {
		t.Errorf("%d bytes are available", n)
	}
}
