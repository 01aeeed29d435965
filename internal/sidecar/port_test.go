package sidecar

import (
	"net"
	"slices"
	"testing"
)

func TestPortsAreNobodyElses(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	at := taken.Addr().(*net.TCPAddr).Port
	first, err := freePort("127.0.0.1", []span{{at, at}, {at + 1, at + 3}})
	if err != nil {
		t.Skip("its neighbours are in use: ", err)
	}
	if first == at {
		t.Error("a port that somebody listens on was given")
	}
	// What was given is not given again, although nobody listens there.
	if again, err := freePort("127.0.0.1", []span{{first, first}}); err == nil {
		t.Errorf("port %d was given twice", again)
	}
	port, err := FreePort("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(portRange(), func(s span) bool { return s.first <= port && port <= s.last }) {
		t.Errorf("port %d is where the kernel takes ports for outgoing connections", port)
	}
	if _, err := FreePort("192.0.2.1"); err == nil {
		t.Error("a port of another host was given")
	}
}

func TestPortRange(t *testing.T) {
	for _, row := range []struct {
		first, last int
		want        []span
	}{
		{32768, 60999, []span{{10240, 32767}, {61000, 65535}}},
		{1024, 65535, []span{{10240, 65535}}},
		{1024, 20000, []span{{20001, 65535}}},
		{15000, 65000, []span{{10240, 14999}}},
	} {
		if got := outside(row.first, row.last); !slices.Equal(got, row.want) {
			t.Errorf("outside %d to %d is %v, want %v", row.first, row.last, got, row.want)
		}
	}
}
