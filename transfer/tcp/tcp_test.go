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

// The same where every piece is gathered into a buffer before it is sent, and scattered from one when it has come.
func TestConformanceStaged(t *testing.T) {
	f := factory()
	f.Config = func(c *transfer.Config) { c.Method = "staged" }
	transporttest.Run(t, f)
}
