package tcp

import (
	"net"
	"strings"
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

// A congestion control that the host lacks is an error that names it.
func TestUnknownCongestionControl(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for name, wrong := range map[string]bool{"": false, "host": false, "reno": false, "none-such": true} {
		tr := New(Config{Congestion: name}).(*transport)
		_, err := tr.newLane(&transfer.Setup{}, 0, conn)
		if (err != nil) != wrong || wrong && !strings.Contains(err.Error(), name) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
