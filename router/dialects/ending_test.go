package dialects

import "testing"

// TestEnding goes through all there is: what every dialect holds to, and what each of them needs besides.
func TestEnding(t *testing.T) {
	courses := []course{unsent, sent, answered, ended}
	for _, tongue := range []tongue{{}, {deaf: true}, {ticketed: true}, {leased: true}, {leased: true, stored: true}} {
		for _, p := range courses {
			for _, d := range courses {
				for _, begun := range []bool{false, true} {
					for _, done := range []bool{false, true} {
						if begun && d == unsent || done && !begun {
							continue // content comes from a leg
						}
						e := tongue.end(p, d, begun, done)
						checkEnding(t, tongue, p, d, begun, done, e)
					}
				}
			}
		}
	}
}

func checkEnding(t *testing.T, k tongue, p, d course, begun, done bool, e ending) {
	wrong := func(why string) {
		t.Errorf("%+v, prefill %d, answer %d, begun %v, done %v: %+v: %s", k, p, d, begun, done, e, why)
	}
	open := func(c course) bool { return c == sent || c == answered }
	switch {
	case !done && open(d) && e.answer == leave, open(p) && e.prefill == leave:
		wrong("a leg stays open")
	case (p == unsent || p == ended) && e.prefill != leave && e.prefill != seeThrough, (d == unsent || d == ended) && e.answer != leave && !done:
		wrong("something is done with a leg that is none")
	case done && e.answer != finish:
		wrong("the answer's connection is not kept")
	case (e.prefill == callOff || e.answer == callOff) && (!k.deaf || done):
		wrong("an engine is told to abort")
	case k.deaf && !done && open(d) && e.answer != callOff, k.deaf && !done && open(p) && e.prefill != callOff:
		wrong("a deaf engine is not told")
	case e.recall && (!k.ticketed || begun || done), k.ticketed && !begun && (p != unsent || d != unsent) && !e.recall:
		wrong("the ticket")
	case (e.answer == linger) != (k.leased && !begun && !done && open(d)):
		wrong("decode lingers")
	case (e.prefill == seeThrough) != (k.stored && (open(p) || p == ended && d == unsent)):
		wrong("prefill is seen through")
	}
}
