package doctor

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/cgo"
)

var testKey = []byte("a cluster key of some length")

// serve answers examinations of x until the test ends, and gives the address.
func serve(t *testing.T, x Examiner) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- x.Listen(ctx, l, testKey, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if h := cgo.Live(); h.Total() != 0 {
			t.Errorf("objects are left: %+v", h)
		}
	})
	return l.Addr().String()
}

func find(t *testing.T, r *Report, name string) Check {
	t.Helper()
	for _, c := range r.Checks {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %q among %+v", name, r.Checks)
	return Check{}
}

func examine(t *testing.T, p *Peer) *Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	r := &Report{}
	p.Examine(ctx, r)
	checkWords(t, r)
	return r
}

// bare is a host without RDMA, whose clock is kept.
func bare() fs.FS { return files(map[string]string{"proc/sys/kernel/osrelease": "6.1"}) }

func TestTwoHosts(t *testing.T) {
	addr := serve(t, Examiner{Root: bare(), Host: "far", Build: "v2"})
	r := examine(t, &Peer{Examiner: Examiner{Root: bare(), Host: "near", Build: "v1"}, Addr: addr, Key: testKey})
	if !r.OK() || r.Peer != "far" {
		t.Errorf("the report is %+v", r)
	}
	for name, want := range map[string]string{"connection": "hold the same key", "protocol": "builds v1 here, v2 there", "clocks": "far is ", "interface MTU": "at both ends"} {
		if c := find(t, r, name); c.Answer != Yes || !strings.Contains(c.Detail, want) {
			t.Errorf("%+v, want yes with %q", c, want)
		}
	}
	if c := find(t, r, "RDMA"); c.Answer != Lacking || !strings.Contains(c.Detail, "neither end") {
		t.Errorf("%+v", c)
	}
	r.NeedRDMA()
	if r.OK() {
		t.Error("two hosts without RDMA are fine for RDMA")
	}
}

func TestClockOfThePeerIsOff(t *testing.T) {
	late := func() time.Time { return time.Now().Add(-5 * time.Second) }
	addr := serve(t, Examiner{Root: bare(), Host: "far", Now: late})
	c := find(t, examine(t, &Peer{Examiner: Examiner{Root: bare(), Host: "near"}, Addr: addr, Key: testKey}), "clocks")
	if c.Answer != Lacking || !strings.Contains(c.Detail, "behind") || !strings.Contains(c.Detail, "give or take") || c.Command == "" {
		t.Errorf("%+v", c)
	}
	if c := find(t, examine(t, &Peer{Examiner: Examiner{Root: bare(), Host: "far", Now: late}, Addr: addr, Key: testKey}), "clocks"); c.Answer != Yes {
		t.Errorf("two hosts that are late alike: %+v", c)
	}
}

func TestNoExamination(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	l.Close()
	stranger, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	go func() {
		c, err := stranger.Accept()
		if err == nil {
			io.CopyN(c, c, 100)
			c.Close()
		}
	}()
	for name, row := range map[string]struct {
		addr, helps string
		key         []byte
	}{
		"nobody":      {closed, "doctor --serve " + closed, testKey},
		"another key": {serve(t, Examiner{Root: bare()}), "--cluster-key-file", []byte("another key of the same length")},
		"a stranger":  {stranger.Addr().String(), "doctor --serve", testKey},
	} {
		r := examine(t, &Peer{Examiner: Examiner{Root: bare()}, Addr: row.addr, Key: row.key})
		if c := find(t, r, "connection"); r.OK() || c.Answer != Needed || !strings.Contains(c.Remedy+c.Command, row.helps) {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

func port4(netdev string, mtu uint32, ether int) portFacts {
	return portFacts{Device: "rxe0", Port: 1, Layer: ethernet, State: "ACTIVE", Netdev: netdev, NetdevMTU: ether, MTU: mtu,
		GIDs: []gidFacts{{0, "RoCE v2", "fe80:0000:0000:0000:0000:0000:0000:0001"}, {1, "RoCE v2", "0000:0000:0000:0000:0000:ffff:0a09:0001"}}}
}

func TestComparisons(t *testing.T) {
	x := &exam{Peer: &Peer{}, name: "far"}
	a, small := port4("d0", 4096, 4200), port4("d1", 1024, 1500)
	if c := x.roceMTU("p", &a, &a); c.Answer != Yes {
		t.Errorf("%+v", c)
	}
	if c := x.roceMTU("p", &a, &small); c.Answer != Lacking || c.Command != "ip link set dev d1 mtu 4200" || c.Host != "far" {
		t.Errorf("small there: %+v", c)
	}
	if c := x.roceMTU("p", &small, &a); c.Answer != Lacking || c.Command != "ip link set dev d1 mtu 4200" || c.Host != "" {
		t.Errorf("small here: %+v", c)
	}
	if c := x.etherMTU(&facts{Interface: "e", MTU: 9000}, &facts{Interface: "f", MTU: 1500}); c.Command != "ip link set dev f mtu 9000" || c.Host != "far" {
		t.Errorf("%+v", c)
	}
	if c := x.protocol(&facts{Low: 1, High: 3}, &facts{Low: 1, High: 2}); c.Answer != Lacking || c.Host != "far" || !strings.Contains(c.Detail, "agree on 2") {
		t.Errorf("%+v", c)
	}
	if w := ways(&a, &small); len(w) != 2 || w[0].own.Index != 1 {
		t.Errorf("ways are %+v", w)
	}
	poor := port4("d2", 4096, 4200)
	poor.GIDs = nil
	if c := x.noWay("p", &a, &poor); c.Command != "ip addr add ADDRESS/PREFIX dev d2" || c.Host != "far" || !strings.Contains(c.Detail, "no RoCE v2 address there") {
		t.Errorf("%+v", c)
	}
	ib := portFacts{Layer: "InfiniBand", State: "ACTIVE"}
	if c, ok := x.pair(&a, &ib); ok || len(c) != 1 || c[0].Answer != Lacking {
		t.Errorf("%+v", c)
	}
	one, none := &facts{Ports: []portFacts{a}}, &facts{Lacks: "it has no RDMA port"}
	if c := x.noPorts(one, none); c.Host != "far" || c.Command == "" {
		t.Errorf("%+v", c)
	}
	if c := x.noPorts(none, one); c.Host != "" || !strings.Contains(c.Detail, "not here") {
		t.Errorf("%+v", c)
	}
}

func TestExaminerRefusesNonsense(t *testing.T) {
	near, far := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- (&Examiner{Root: bare()}).Serve(context.Background(), far) }()
	for _, q := range []request{
		{Op: "dance"}, {Op: "join"}, {Op: "join", Use: &pairUsage{Device: "none", Bytes: 1 << 30}, End: &endpoint{}},
		{Op: "join", Use: &pairUsage{Device: "none", Bytes: 4096}, End: &endpoint{}},
	} {
		if err := writeMessage(near, &q); err != nil {
			t.Fatal(err)
		}
		var a answer
		if err := readMessage(near, &a); err != nil || a.Error == "" {
			t.Errorf("%+v was answered by %+v, %v", q, a, err)
		}
	}
	near.Write(binary.LittleEndian.AppendUint32(nil, messageMax+1))
	if err := <-done; err == nil {
		t.Error("a message without end was taken")
	}
	near.Close()
}

func FuzzMessages(f *testing.F) {
	var b bytes.Buffer
	if err := writeMessage(&b, &request{Op: "join", Use: &pairUsage{Device: "rxe0", Port: 1}, End: &endpoint{GID: "fe80::"}}); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		var q request
		if readMessage(bytes.NewReader(b), &q) != nil {
			return
		}
		var again bytes.Buffer
		if err := writeMessage(&again, &q); err != nil {
			t.Fatal(err)
		}
	})
}
