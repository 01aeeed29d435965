package cgo

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
)

func newNull(t testing.TB, depth int) (*QP, *CQ) {
	t.Helper()
	q, c, err := NullQP(depth)
	if errors.Is(err, ErrNotSupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { CloseNull(q) })
	return q, c
}

// A queue that is full takes a part and says how many; the rest fits after completions.
func TestPostWhatFits(t *testing.T) {
	for _, depth := range []int{1, 63, 64, 65, 128, 200} {
		t.Run(fmt.Sprintf("depth %d", depth), func(t *testing.T) {
			q, c := newNull(t, depth)
			wrs := make([]WR, 200)
			for i := range wrs {
				wrs[i] = WR{ID: uint64(i), Len: 1, Imm: uint32(i), Op: WriteImm, Flags: Signaled}
			}
			var next uint64
			for left := wrs; len(left) > 0; {
				n, errno := q.PostSend(left)
				if want := min(depth, len(left)); n != want || (errno == syscall.ENOMEM) != (want < len(left)) {
					t.Fatalf("posted %d of %d: %v", n, len(left), errno)
				}
				left = left[n:]
				for wcs := make([]WC, 7); ; {
					k, err := c.Poll(wcs)
					if err != nil {
						t.Fatal(err)
					}
					if k == 0 {
						break
					}
					for _, wc := range wcs[:k] {
						if wc.ID != next || wc.Imm != uint32(next) || wc.HasImm != 1 || wc.Op != WCWrite || wc.Status != Success || wc.Bytes != 1 || wc.QPN != 1 {
							t.Fatalf("completion %d is %+v", next, wc)
						}
						next++
					}
				}
			}
			if next != uint64(len(wrs)) {
				t.Errorf("%d completions of %d", next, len(wrs))
			}
		})
	}
}

func TestPostRefusesNonsense(t *testing.T) {
	q, _ := newNull(t, 8)
	for _, wr := range []WR{{Op: LocalInv + 1}, {Op: 1 << 31}, {Flags: 16}} {
		if n, errno := q.PostSend([]WR{{Len: 1}, wr}); n != 0 || errno != syscall.EINVAL {
			t.Errorf("%+v: posted %d, %v", wr, n, errno)
		}
	}
	if n, errno := q.PostSend(nil); n != 0 || errno != 0 {
		t.Errorf("nothing: %d, %v", n, errno)
	}
}

func TestSelectiveSignalling(t *testing.T) {
	q, c := newNull(t, 64)
	wrs := make([]WR, 40)
	for i := range wrs {
		wrs[i] = WR{ID: uint64(i), Len: 1}
		if i%16 == 15 || i == len(wrs)-1 {
			wrs[i].Flags = Signaled
		}
	}
	if n, errno := q.PostSend(wrs); n != len(wrs) || errno != 0 {
		t.Fatalf("posted %d, %v", n, errno)
	}
	wcs := make([]WC, 64)
	n, err := c.Poll(wcs)
	if err != nil || n != 3 || wcs[0].ID != 15 || wcs[1].ID != 31 || wcs[2].ID != 39 {
		t.Errorf("%d completions, %v: %+v", n, err, wcs[:n])
	}
}

func TestPostAndPollAllocateNothing(t *testing.T) {
	q, c := newNull(t, 256)
	wrs, wcs := make([]WR, 200), make([]WC, 256)
	wrs[199].Flags = Signaled
	if n := testing.AllocsPerRun(100, func() {
		if n, errno := q.PostSend(wrs); n != len(wrs) || errno != 0 {
			t.Fatal(n, errno)
		}
		if n, err := c.Poll(wcs); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkPost posts n scattered blocks to a provider that does nothing; "loop/post" is a plain C loop that posts the same,
// in the faster of its two forms, by ours, measured in turns.
func BenchmarkPost(b *testing.B) {
	for _, n := range []int{1, 64, 1000} {
		b.Run(fmt.Sprintf("blocks=%d", n), func(b *testing.B) {
			q, _ := newNull(b, 0)
			wrs := make([]WR, n)
			var loop, chained uint64
			b.ReportAllocs()
			for b.Loop() {
				for i := range wrs { // what a transport does for each run
					wrs[i] = WR{Local: 1<<40 + uint64(i)<<17, Remote: 1<<41 + uint64(i*7919%n)<<17, ID: uint64(i), Len: 64 << 10, LKey: 1, RKey: 2}
				}
				wrs[n-1].Flags = Signaled
				if k, errno := q.PostSend(wrs); k != n || errno != 0 {
					b.Fatal(k, errno)
				}
				b.StopTimer()
				loop += NullLoop(q, wrs, 1, false)
				chained += NullLoop(q, wrs, 1, true)
				b.StartTimer()
			}
			ours := float64(b.Elapsed().Nanoseconds()) / float64(b.N)
			b.ReportMetric(ours/float64(n), "ns/block")
			b.ReportMetric(float64(loop)/float64(b.N), "C-loop-ns/op")
			b.ReportMetric(float64(chained)/float64(b.N), "C-chain-ns/op")
			b.ReportMetric(ours/(float64(min(loop, chained))/float64(b.N)), "x-C")
		})
	}
}
