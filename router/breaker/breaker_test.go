package breaker

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// made is a closed breaker with default settings, and its clock.
func made(t *testing.T) (*Breaker, *time.Time) {
	t.Helper()
	cfg := &Config{}
	if err := cfg.Check(); err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	return New(cfg), &now
}

func TestLost(t *testing.T) {
	b, now := made(t)
	for _, want := range []time.Duration{1, 2, 4, 8, 10, 10} {
		if !b.Failed(*now, Lost, "refused") || b.Failed(*now, Lost, "refused") {
			t.Fatal("one fault does not count once")
		}
		if s := b.State(*now); s.Phase != Open || s.Until.Sub(*now) != want*time.Second || s.Reason != "refused" || !s.Lost {
			t.Errorf("%+v, want %d s", s, want)
		}
		if trial, ok := b.Take(*now); trial || !ok {
			t.Error("who has nobody else to go to may not")
		}
		*now = now.Add(want * time.Second)
	}
	b.Served(*now)
	if s := b.State(*now); s.Phase != Closed {
		t.Errorf("%+v behind a success", s)
	}
	b.Failed(*now, Lost, "lost")
	b.Served(*now) // a stream from before
	if s := b.State(*now); s.Phase != Closed {
		t.Errorf("%+v though it serves", s)
	}
}

func TestHalfOpen(t *testing.T) {
	b, now := made(t)
	b.Failed(*now, Lost, "silent")
	*now = now.Add(time.Second)
	if s := b.State(*now); s.Phase != HalfOpen || s.Trying {
		t.Fatalf("%+v", s)
	}
	if trial, ok := b.Take(*now); !trial || !ok {
		t.Error("nobody may try")
	}
	if _, ok := b.Take(*now); ok || !b.State(*now).Trying {
		t.Error("two try at once")
	}
	b.Done() // the client left
	if trial, ok := b.Take(*now); !trial || !ok {
		t.Error("a trial that showed nothing keeps others out")
	}
	*now = now.Add(trialMax)
	if trial, _ := b.Take(*now); !trial {
		t.Error("a long trial keeps others out")
	}
	if b.Failed(*now, Erred, "error"); b.State(*now).Phase != Open {
		t.Error("a trial that failed does not count")
	}
	*now = now.Add(2 * time.Second)
	b.Take(*now)
	if b.Served(*now); b.State(*now).Phase != Closed {
		t.Error("a trial that was served does not count")
	}
	if trial, ok := b.Take(*now); trial || !ok {
		t.Error("a closed one is tried")
	}
}

func TestErrors(t *testing.T) {
	t.Run("row", func(t *testing.T) {
		b, now := made(t)
		for range 4 {
			b.Failed(*now, Erred, "error")
		}
		b.Served(*now)
		for i := range 5 {
			if opened := b.Failed(*now, Erred, "error"); opened != (i == 4) {
				t.Errorf("failure %d in a row: %v", i+1, opened)
			}
		}
		if s := b.State(*now); !strings.Contains(s.Reason, "5 times in a row") || s.Lost {
			t.Errorf("%+v", s)
		}
		if b.Served(*now); b.State(*now).Phase != Open {
			t.Error("a success of another request closes it")
		}
	})
	t.Run("share", func(t *testing.T) {
		b, now := made(t)
		for i := range 5 {
			b.Served(*now)
			if opened := b.Failed(*now, Erred, "error"); opened != (i == 4) {
				t.Errorf("failure %d of %d: %v", i+1, 2*i+2, opened)
			}
		}
		if s := b.State(*now); !strings.Contains(s.Reason, "5 of 10 attempts") {
			t.Errorf("%+v", s)
		}
	})
	t.Run("forgets", func(t *testing.T) {
		b, now := made(t)
		for range 40 {
			b.Served(*now)
			if b.Failed(*now, Erred, "error") {
				t.Fatal("errors of long ago count")
			}
			*now = now.Add(4 * time.Second)
		}
	})
	t.Run("below the share", func(t *testing.T) {
		b, now := made(t)
		for i := range 1000 {
			*now = now.Add(10 * time.Millisecond)
			if i%3 == 0 && b.Failed(*now, Erred, "error") {
				t.Fatal("a third opens it")
			}
			if i%3 != 0 {
				b.Served(*now)
			}
		}
	})
}

// TestComesBack: whatever happened, a worker that serves again is trusted again within OpenMax and a trial.
func TestComesBack(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 5))
		b, now := made(t)
		for range 100 {
			*now = now.Add(time.Duration(rng.IntN(4000)) * time.Millisecond)
			switch rng.IntN(4) {
			case 0:
				b.Failed(*now, Lost, "lost")
			case 1:
				b.Failed(*now, Erred, "error")
			case 2:
				b.Served(*now)
			default:
				b.Take(*now)
			}
			if s := b.State(*now); s.Phase == Open && s.Until.Sub(*now) > 10*time.Second {
				t.Fatalf("seed %d: open for %s", seed, s.Until.Sub(*now))
			}
		}
		*now = now.Add(10*time.Second + trialMax)
		if _, ok := b.Take(*now); !ok {
			t.Fatalf("seed %d: nobody may try it", seed)
		}
		if b.Served(*now); b.State(*now).Phase != Closed {
			t.Fatalf("seed %d: %+v though it serves", seed, b.State(*now))
		}
	}
}

func TestCheck(t *testing.T) {
	for _, c := range []Config{{Row: -1}, {Share: 1.5}, {Share: -0.1}, {OpenMin: time.Minute}, {Window: -1}} {
		if c.Check() == nil {
			t.Errorf("%+v is taken", c)
		}
	}
}

func TestBudget(t *testing.T) {
	now := time.Unix(1000, 0)
	b := NewBudget(0.2, 0)
	if b.Retry(now) {
		t.Error("a retry without requests")
	}
	requests, retries := 0, 0
	rng := rand.New(rand.NewPCG(1, 1))
	for range 20000 { // everything fails, and is tried again as often as it may
		now = now.Add(time.Duration(rng.IntN(20)) * time.Millisecond)
		b.Request(now)
		requests++
		for b.Retry(now) {
			retries++
		}
	}
	if got := float64(retries) / float64(requests); got < 0.15 || got > 0.22 {
		t.Errorf("%.3f retries a request", got)
	}
	b = NewBudget(0, 3)
	now = now.Add(time.Hour)
	retries = 0
	for range 60 {
		now = now.Add(time.Second)
		for b.Retry(now) {
			retries++
		}
	}
	if retries < 150 || retries > 3*70 {
		t.Errorf("%d retries in 60 s", retries)
	}
}
