package doctor

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
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
	if p := pairs(2, 3); len(p) != 6 || p[0] != [2]int{0, 0} || p[1] != [2]int{1, 1} || p[5] != [2]int{0, 2} {
		t.Errorf("pairs are %v", p)
	}
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

// Over RDMA a host examines itself: what two hosts do is in test/broken.
func TestWritesOverRDMA(t *testing.T) {
	root := os.DirFS("/")
	if v := cgo.Probe(); v.Err() != nil {
		if os.Getenv("HEADRACE_LAB") != "" {
			t.Fatalf("the lab has no RDMA: %v", v.Err())
		}
		t.Skipf("%v (make lab has it)", v.Err())
	}
	addr := serve(t, Examiner{Root: root, Host: "here"})
	r := examine(t, &Peer{Examiner: Examiner{Root: root, Host: "here"}, Addr: addr, Key: testKey})
	written := 0
	for _, c := range r.Checks {
		t.Logf("%-8s %-24s %s", c.Answer, c.Name, c.Detail)
		if strings.HasSuffix(c.Name, " write") && c.Answer == Yes && strings.Contains(c.Detail, "as sent") {
			written++
		}
	}
	if written == 0 {
		t.Errorf("nothing was written: %+v", r.Checks)
	}
	// A queue pair whose other end is nowhere: an error, in time, and nothing left.
	devices := here(root).devices()
	p := &devices[0].ports[0]
	best, _ := p.best()
	use := &pairUsage{Device: devices[0].name, Port: p.number, GID: best.index, Text: best.text, MTU: smallMTU, Bytes: tryBytes}
	e, err := openEnd(use)
	if err != nil {
		t.Fatal(err)
	}
	defer e.close()
	nowhere := e.own
	nowhere.QPN ^= 0x7fff
	if err := e.join(use, &nowhere); err != nil {
		t.Fatal(err)
	}
	if took, err := e.write(&nowhere, patience); err == nil {
		t.Errorf("a write to a queue pair that is not there was acknowledged after %v", took)
	}
}

// A daemon of the future answers as docs/protocol.md says: no common version, and what it speaks.
func TestVersionSkewIsShown(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		said := make([]byte, 200)
		if _, err := io.ReadFull(c, said); err != nil {
			return
		}
		b := make([]byte, 184, 216)
		copy(b, "HEADRACE")
		for at, v := range map[int]uint16{10: 1, 12: 8, 14: 9} {
			binary.LittleEndian.PutUint16(b[at:], v)
		}
		copy(b[48:], "\x06future")
		mac := hmac.New(sha256.New, testKey)
		mac.Write([]byte("headrace 1 accept"))
		mac.Write(said)
		mac.Write(b)
		c.Write(mac.Sum(b))
	}()
	r := examine(t, &Peer{Examiner: Examiner{Root: bare()}, Addr: l.Addr().String(), Key: testKey})
	<-done
	c := find(t, r, "connection")
	for _, want := range []string{"future 8 to 9", "upgrade this node"} {
		if c.Answer != Needed || !strings.Contains(c.Detail, want) {
			t.Errorf("%+v, want needed with %q", c, want)
		}
	}
}
