package telemetry

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/headrace/headrace/transfer"
)

// bth is a packet of a reliable connection, as it stands behind the UDP header, with that much payload.
func bth(opcode uint8, qpn, psn uint32, headers []byte, payload int) []byte {
	b := make([]byte, 12, 12+len(headers)+payload+4)
	b[0] = opcode
	binary.BigEndian.PutUint32(b[4:], qpn)
	binary.BigEndian.PutUint32(b[8:], psn)
	b = append(b, headers...)
	return append(b, make([]byte, payload+4)...) // and the checksum
}

// What passes a network device is told apart: data, acknowledgements, refusals, what comes again, whose it is.
func TestPacketsAreToldApart(t *testing.T) {
	if c := judge("packets", closed(newPackets())); c.Answer != Yes {
		skip(t, "%s; %s", c.Reason, c.Remedy)
	}
	for _, host := range []string{"127.0.0.1", "::1"} {
		t.Run(host, func(t *testing.T) {
			newNetwork(t, 0)
			const near, far = 17, 99
			tel := openFor(t, Config{Mode: Auto, Cgroup: t.TempDir()})
			g := tel.Channel()
			defer g.Close()
			end := g.Lane(transfer.Flow{Transport: "rdma", Queue: &transfer.QueuePair{Device: "rxe9", Port: 1, Netdev: "lo", Num: near, PeerNum: far, PeerPort: netip.MustParseAddr(host)}})
			sink, err := net.ListenPacket("udp", net.JoinHostPort(host, "4791")) // else what is refused stops what follows
			if err != nil {
				t.Fatal(err)
			}
			defer sink.Close()
			conn, err := net.Dial("udp", net.JoinHostPort(host, "4791"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			send := func(b []byte) {
				t.Helper()
				if _, err := conn.Write(b); err != nil {
					t.Fatal(err)
				}
			}
			reth, aeth := make([]byte, 16), func(syndrome byte) []byte { return []byte{syndrome, 0, 0, 1} }
			send(bth(6, far, 0xfffffe, reth, 1024)) // write first, middle, last, across the end of the numbers
			send(bth(7, far, 0xffffff, nil, 1024))
			send(bth(8, far, 0, nil, 100))
			send(bth(7, far, 0xffffff, nil, 1024)) // two of them again
			send(bth(8, far, 0, nil, 100))
			send(bth(10, far, 1, reth, 64)) // write only
			send(bth(12, far, 2, reth, 0))  // a read's request is no data
			send(bth(17, near, 0, aeth(0x1f), 0))
			send(bth(17, near, 0, aeth(0x60), 0)) // out of order
			send(bth(17, near, 0, aeth(0x20), 0)) // receiver not ready
			send(bth(16, near, 2, aeth(0x1f), 512))
			send(bth(0x81, near, 0, make([]byte, 16), 0)) // congestion
			send(bth(10, 4242, 7, reth, 32))              // somebody else's
			send([]byte("short"))
			other, err := net.Dial("udp", net.JoinHostPort(host, "4792"))
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			if _, err := other.Write(bth(10, far, 9, reth, 64)); err != nil {
				t.Fatal(err)
			}
			// Over loopback each packet leaves and arrives: what goes to the peer's queue pair was sent, to ours received.
			w := g.Wire()
			if w.Source != sourceEBPF {
				t.Fatalf("%s: %s", w.Source, w.Why)
			}
			want := transfer.Wire{Source: w.Source, Why: w.Why, SentBytes: 3*1024 + 2*100 + 64, SentPackets: 7, RetransmittedBytes: 1124, RetransmittedPackets: 2, ReceivedBytes: 512, ReceivedPackets: 5}
			if w != want {
				t.Errorf("the lane has\n%+v, want\n%+v", w, want)
			}
			r := tel.Rails()[0]
			if r.Sent.Packets != 13 || r.Sent.Acks != 1 || r.Sent.Naks != 2 || r.Sent.Other != 1 || r.Sent.DataPackets != 8 || r.Sent.DataBytes != want.SentBytes+512+32 || r.Received.Packets != 13 {
				t.Errorf("the rail has %+v", r)
			}
			end()
			if after := tel.Rails()[0]; after.Sent != r.Sent {
				t.Errorf("with its lane the rail went from %+v to %+v", r.Sent, after.Sent)
			}
			if n := entries(t, tel.packets.objs.Flows); n != 2 {
				t.Errorf("%d flows are left, want one of the peer's each way", n)
			}
		})
	}
}
