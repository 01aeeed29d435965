package tcp

import (
	"testing"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

func TestConformance(t *testing.T) {
	transporttest.Run(t, transporttest.Factory{
		New: func() transfer.Transport { return New(Config{}) }, ReadPause: transfer.PauseReadFrame,
	})
}
