package tcp

import (
	"net"
	"testing"

	"github.com/headrace/headrace/transfer/transporttest"
)

// The suite for two machines, played by two tests of this process side by side: `make lab` has the machines.
func TestTwins(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"first", "second"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			transporttest.RunTwin(t, transporttest.Twin{Factory: factory(), Number: i + 1, Hosts: [2]string{"127.0.0.1", "127.0.0.1"}, Port: port})
		})
	}
}
