package registry

import (
	"errors"
	"testing"
)

func TestDrain(t *testing.T) {
	e := startEtcd(t, t.TempDir(), anyPort)
	r := open(t, e.Addr())
	table := watch(t, r)
	w := worker("w")
	a := announce(t, r, KindWorker, "w", w)
	announce(t, r, KindWorker, "x", worker("x"))
	weighs := func(drained bool) func(*View) bool {
		return func(v *View) bool {
			w, ok := v.Worker("w")
			x, _ := v.Worker("x")
			return ok && x.Weight == nil && (w.Weight != nil && *w.Weight == 0) == drained
		}
	}
	if err := r.Drain(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	await(t, table, "the drain", weighs(true))
	await(t, watch(t, open(t, e.Addr())), "the drain, for who comes later", weighs(true))
	next := w
	next.PID++
	if err := a.Update(next); err != nil {
		t.Fatal(err)
	}
	await(t, table, "a new process to get requests", weighs(false))
	if err := a.Update(w); err != nil {
		t.Fatal(err)
	}
	await(t, table, "the old process", weighs(true))
	if err := r.Undrain(t.Context(), "w"); err != nil {
		t.Fatal(err)
	}
	await(t, table, "the end of the drain", weighs(false))
	if err := r.Undrain(t.Context(), "w"); !errors.Is(err, ErrNotDrained) {
		t.Errorf("undrain twice: %v", err)
	}
}
