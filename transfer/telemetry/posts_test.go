//go:build amd64 || arm64

package telemetry

import (
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/cgo"
)

func needPosts(t testing.TB) Posts {
	e := cgo.EntryPoints()
	if e.Post == 0 {
		t.Skip("this build has no RDMA: nothing is posted")
	}
	if c := judge("posts", probePosts()); c.Answer != Yes {
		if inLab() {
			t.Fatalf("%s; %s", c.Reason, c.Remedy)
		}
		t.Skipf("%s; %s", c.Reason, c.Remedy)
	}
	return Posts{Post: e.Post, Poll: e.Poll}
}

// nullQueue is a queue pair with nothing behind it, whose work is completed when it is polled.
func nullQueue(t testing.TB, depth int) (*cgo.QP, *cgo.CQ) {
	t.Helper()
	qp, cq, err := cgo.NullQP(depth)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { cgo.CloseNull(qp) })
	return qp, cq
}

func chain(from uint64, n int) []cgo.WR {
	wrs := make([]cgo.WR, n)
	for i := range wrs {
		wrs[i].ID = from + uint64(i)
	}
	wrs[n-1].Flags = cgo.Signaled
	return wrs
}

// A part of the chains is timed, each from its posting to the poll that finds it, and no shorter than it took.
func TestPostsAreTimed(t *testing.T) {
	tel := openFor(t, Config{Mode: Auto, Posts: needPosts(t)})
	if tel.posts == nil {
		t.Fatal(tel.why["posts"])
	}
	qp, cq := nullQueue(t, 128)
	if err := tel.posts.watch(qp.Num); err != nil {
		t.Fatal(err)
	}
	const chains, pause = 1024, 100 * time.Microsecond
	wcs := make([]cgo.WC, 64)
	var spent time.Duration
	for i := range chains {
		began := time.Now()
		if n, errno := qp.PostSend(chain(uint64(i*64+1), 64)); n != 64 {
			t.Fatal(n, errno)
		}
		for posted := time.Now(); time.Since(posted) < pause; { // what is measured takes so long at least
		}
		n, err := cq.Poll(wcs)
		if err != nil || n != 1 {
			t.Fatal(n, err)
		}
		spent += time.Since(began)
	}
	times, ok := tel.Times()
	if want := uint64(chains / 32); !ok || times.Count < want/2 || times.Count > want*2 {
		t.Fatalf("%d of %d chains were timed (%v), want about %d", times.Count, chains, ok, want)
	}
	s := times.sum()
	t.Logf("%d timed: mean %.1f us, half within %.1f us, 99 %% within %.1f us; by the clock %.1f us each", s.Count, s.MeanMicros, s.P50Micros, s.P99Micros, float64(spent.Microseconds())/chains)
	if s.MeanMicros < 100 || s.P50Micros < 131 || s.P50Micros > 4*float64(spent.Microseconds())/chains {
		t.Errorf("%+v, but it takes %v each", s, spent/chains)
	}
	// Another queue pair's are not: nobody asked.
	before := times.Count
	tel.posts.forget(qp.Num)
	for i := range 256 {
		qp.PostSend(chain(uint64(i+1), 1))
		cq.Poll(wcs)
	}
	if times, _ = tel.Times(); times.Count != before {
		t.Errorf("%d are timed after the lane is gone, want %d", times.Count, before)
	}
}

// What the probes cost a chain of 64: run with and without.
func BenchmarkPost64(b *testing.B) {
	for _, probes := range []bool{false, true} {
		name := "without probes"
		if probes {
			name = "with probes"
		}
		b.Run(name, func(b *testing.B) {
			qp, cq := nullQueue(b, 128)
			if probes {
				p, err := newPosts(needPosts(b))
				if err != nil {
					b.Fatal(err)
				}
				defer p.Close()
				if err := p.watch(qp.Num); err != nil {
					b.Fatal(err)
				}
			}
			wrs, wcs, id := chain(1, 64), make([]cgo.WC, 64), uint64(64)
			for b.Loop() {
				id += 64
				wrs[63].ID = id
				qp.PostSend(wrs)
				cq.Poll(wcs)
			}
		})
	}
}

func TestFileOffset(t *testing.T) {
	const maps = `55d0c0a00000-55d0c0b00000 r--p 00000000 fe:00 1 /bin/headrace
55d0c0b00000-55d0c0c00000 r-xp 00100000 fe:00 1 /bin/headrace
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
`
	for _, c := range []struct {
		addr, want uint64
		ok         bool
	}{{0x55d0c0b00010, 0x100010, true}, {0x55d0c0a00010, 0, false}, {0x10, 0, false}} {
		got, err := fileOffset(strings.NewReader(maps), c.addr)
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("%#x: %#x, %v", c.addr, got, err)
		}
	}
	if _, err := fileOffset(strings.NewReader("what is this\n"), 1); err == nil {
		t.Error("a line that is no mapping was taken")
	}
}
