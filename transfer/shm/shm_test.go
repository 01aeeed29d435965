package shm

import (
	"testing"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

func TestConformance(t *testing.T) {
	transporttest.Run(t, transporttest.Factory{New: New, Local: true, ReadPause: transfer.PauseCopyPiece})
}
