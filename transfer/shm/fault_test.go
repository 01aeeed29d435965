package shm

import (
	"testing"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

// A page that cannot be read (poisoned memory, say) ends its lease with a word: neither the daemon nor the channel.
func TestMemoryFaultEndsTheLease(t *testing.T) {
	transporttest.MemoryFaults(t, transporttest.Factory{New: New, Local: true, ReadPause: transfer.PauseCopyPiece})
}
