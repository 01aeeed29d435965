package registry

import (
	"context"
	"errors"
	"testing"
)

// lead waits until r leads scope s.
func lead(t *testing.T, r *Registry, id string) *Leadership {
	t.Helper()
	l, err := r.Lead(t.Context(), Scope("ns", "models/a"), id)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLead(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	a, b := open(t, e.Addr()), open(t, e.Addr())
	table := watch(t, a)
	first := lead(t, a, "a")
	ctx, cancel := context.WithCancel(t.Context())
	type turn struct {
		l   *Leadership
		err error
	}
	turns := make(chan turn)
	stand := func(ctx context.Context) {
		l, err := b.Lead(ctx, Scope("ns", "models/a"), "b")
		turns <- turn{l, err}
	}
	go stand(ctx)
	if err := first.Put(t.Context(), []byte("mine")); err != nil {
		t.Fatal(err)
	}
	other, err := b.Lead(t.Context(), Scope("ns", "models", "a"), "b")
	if err != nil {
		t.Fatalf("another scope: %v", err)
	}
	if got, err := other.Get(t.Context()); got != nil || err != nil {
		t.Errorf("another scope has %q, %v", got, err)
	}
	if err := other.Resign(); err != nil {
		t.Error(err)
	}
	cancel()
	if got := <-turns; !errors.Is(got.err, context.Canceled) {
		t.Errorf("who waits no longer: %v", got.err)
	}
	go stand(t.Context())
	if err := first.Resign(); err != nil {
		t.Error(err)
	}
	<-first.Lost()
	second := <-turns
	if second.err != nil {
		t.Fatal(second.err)
	}
	for name, err := range map[string]error{"put": first.Put(t.Context(), []byte("late")), "check": first.Check(t.Context())} {
		if !errors.Is(err, ErrNotLeading) {
			t.Errorf("%s by who leads no longer: %v", name, err)
		}
	}
	if got, err := second.l.Get(t.Context()); string(got) != "mine" || err != nil {
		t.Errorf("the next leader reads %q, %v", got, err)
	}
	if err := errors.Join(second.l.Check(t.Context()), second.l.Put(t.Context(), nil)); err != nil {
		t.Error(err)
	}
	if got, err := second.l.Get(t.Context()); got != nil || err != nil {
		t.Errorf("behind the end there is %q, %v", got, err)
	}
	if err := second.l.Resign(); err != nil {
		t.Error(err)
	}
	if v := table.Snapshot(); len(v.Workers)+len(v.Planners) != 0 {
		t.Errorf("elections are in the table: %+v", v)
	}
}

func TestScope(t *testing.T) {
	seen := map[string]bool{}
	for _, parts := range [][]string{{"", "a"}, {"a", ""}, {"a", "b"}, {"a/b", ""}, {"a", "b."}, {"a.", "b"}} {
		s := Scope(parts...)
		if seen[s] {
			t.Errorf("%q is the scope of two", s)
		}
		seen[s] = true
	}
}
