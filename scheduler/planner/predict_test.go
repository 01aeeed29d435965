package planner

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// predictors are the names of those that best asks, and its own.
var predictors = []string{"constant", "moving", "smooth", "arima", "seasonal", "kalman", "best"}

func predictor(t *testing.T, name string) Predictor {
	t.Helper()
	p := newBest(24).named(name)
	if p == nil {
		t.Fatalf("no predictor %q", name)
	}
	return p
}

// randomSeries is one of the kinds that rates come in: noise about a level, steps, ramps, periods, bursts, silence.
func randomSeries(rng *rand.Rand, n int) []float64 {
	level, slope, period, swing := 50*rng.Float64(), 0.4*(rng.Float64()-0.5), float64(4+rng.IntN(60)), 20*rng.Float64()
	kind := rng.IntN(6)
	v := make([]float64, n)
	for i := range v {
		x := level + rng.NormFloat64()*math.Sqrt(level)/3
		switch kind {
		case 1:
			x += slope * float64(i)
		case 2:
			x += swing * math.Sin(float64(i)/period*2*math.Pi)
		case 3:
			if rng.IntN(20) == 0 {
				x *= 5
			}
		case 4:
			if i > n/2 {
				x *= 3
			}
		case 5:
			if i > n/3 {
				x = 0
			}
		}
		v[i] = max(0, x)
	}
	return v
}

// TestPredictorsHold gives each predictor series of all kinds: forecasts are numbers, not below 0 and not far beyond anything seen, and
// one that is restored from its JSON goes on as the one it was written from.
func TestPredictorsHold(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	for range 120 {
		all := randomSeries(rng, 60+rng.IntN(200))
		for _, name := range predictors {
			a := predictor(t, name)
			most := 0.0
			for i, v := range all {
				a.Add(v)
				most = max(most, v)
				if i == len(all)/2 {
					data, err := json.Marshal(a)
					if err != nil {
						t.Fatal(err)
					}
					b := predictor(t, name)
					if err := json.Unmarshal(data, b); err != nil {
						t.Fatal(err)
					}
					if one, two := a.Predict(6), b.Predict(6); one != two {
						t.Fatalf("%s forecasts %v, restored %v", name, one, two)
					}
					a = b
				}
				for _, ahead := range []int{1, 6, 30} {
					if got := a.Predict(ahead); math.IsNaN(got) || got < 0 || got > 10*most+10 {
						t.Fatalf("%s forecasts %v, %d ahead, when nothing was above %v", name, got, ahead, most)
					}
				}
			}
		}
	}
}

// TestLengths draws answers from a queue in which long ones are still being made: those complete are far too short on average, the
// estimate is not.
func TestLengths(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	var l lengths
	var making []int
	sum, complete, shorts := 0.0, 0, 0.0
	const n, now = 2000, 60 * time.Second
	for i := range n {
		tokens := 1 + int(rng.ExpFloat64()*400)
		sum += float64(tokens)
		came := now * time.Duration(i) / n
		if made := int((now - came).Seconds() * 20); made < tokens { // 20 tokens a second
			making = append(making, made)
		} else {
			l.add(tokens, came, now)
			complete++
			shorts += float64(tokens)
		}
	}
	got := 0.0
	for _, v := range l.sample(nil, making, 5000, 0) {
		got += float64(v) / 5000
	}
	if want := sum / n; math.Abs(got-want) > 0.1*want || shorts/float64(complete) > 0.8*want {
		t.Errorf("%.0f tokens on average, want %.0f; complete ones have %.0f", got, want, shorts/float64(complete))
	}
	got = 0
	for _, v := range l.sample(nil, nil, complete, 0) { // nothing told of those in progress: as the complete ones are
		got += float64(v) / float64(complete)
	}
	if want := shorts / float64(complete); math.Abs(got-want) > 0.02*want {
		t.Errorf("%.1f tokens, want %.1f", got, want)
	}
	var full lengths
	for i := range 3 * lengthsMax {
		full.add(1+i%7, time.Duration(i)*time.Second, time.Duration(i+5)*time.Second)
	}
	for _, v := range full.sample(nil, []int{3, 4}, 100, 0) {
		if v < 1 || v > 7 {
			t.Fatalf("%d was never seen", v)
		}
	}
}

// TestLengthsChange has answers become shorter: only those to requests of the window asked for count, or the latest where these are few.
func TestLengthsChange(t *testing.T) {
	var l lengths
	for i := range 1000 {
		tokens := 300
		if i >= 600 {
			tokens = 100
		}
		l.add(tokens, time.Duration(i)*time.Second, time.Duration(i+5)*time.Second)
	}
	for since, want := range map[time.Duration]float64{0: 220, 600 * time.Second: 100, 999 * time.Second: 100} {
		got := 0.0
		for _, v := range l.sample(nil, nil, 1000, since) {
			got += float64(v) / 1000
		}
		if math.Abs(got-want) > 1 {
			t.Errorf("since %v: %.1f tokens on average, want %.0f", since, got, want)
		}
	}
}
