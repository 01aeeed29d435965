package planner

import (
	"encoding/json"
	"fmt"
	"math"
	"time"
)

// Predictor forecasts a series of equal intervals. It is plain data: as JSON it is its state.
type Predictor interface {
	// Add takes the next value.
	Add(v float64)
	// Predict is the forecast of the value so many intervals ahead, 1 the next; never below 0. Without values it is 0.
	Predict(ahead int) float64
}

// constant thinks that what was goes on.
type constant struct {
	Last float64 `json:"last"`
}

func (c *constant) Add(v float64)       { c.Last = v }
func (c *constant) Predict(int) float64 { return max(0, c.Last) }

// moving is the mean of the last values.
type moving struct {
	Width  int       `json:"width"`
	Values []float64 `json:"values,omitempty"`
}

func (m *moving) Add(v float64) {
	m.Values = append(m.Values, v)
	if len(m.Values) > m.Width {
		m.Values = m.Values[:copy(m.Values, m.Values[1:])]
	}
}

func (m *moving) Predict(int) float64 {
	if len(m.Values) == 0 {
		return 0
	}
	sum := 0.0
	for _, v := range m.Values {
		sum += v
	}
	return max(0, sum/float64(len(m.Values)))
}

// smooth is a mean in which a value counts half as much as one smoothHalf later.
type smooth struct {
	N     int     `json:"n"`
	Level float64 `json:"level"`
}

const smoothHalf = 4

func (s *smooth) Add(v float64) {
	s.N++
	s.Level += max(1-math.Pow(0.5, 1.0/smoothHalf), 1/float64(s.N)) * (v - s.Level)
}

func (s *smooth) Predict(int) float64 { return max(0, s.Level) }

// arima is an ARIMA(2,0,1) around a slowly moving mean: its coefficients are learned by recursive least squares with forgetting, the
// error of the forecast before taking the place of the moving average's shock.
type arima struct {
	N     int           `json:"n"`
	Mean  float64       `json:"mean"`
	Past  [2]float64    `json:"past"` // distances from the mean, the last first
	Shock float64       `json:"shock"`
	Coef  [3]float64    `json:"coef"`
	Cov   [3][3]float64 `json:"cov"`
}

const (
	arimaForget = 0.99
	arimaMean   = 0.02 // weight of a new value in the mean
)

func (a *arima) Add(v float64) {
	if a.N == 0 {
		a.Mean = v
		for i := range a.Cov {
			a.Cov[i][i] = 10
		}
	}
	a.N++
	a.Mean += max(arimaMean, 1/float64(a.N)) * (v - a.Mean)
	y := v - a.Mean
	x := [3]float64{a.Past[0], a.Past[1], a.Shock}
	scale := 1 + a.Mean*a.Mean // so that the covariance means the same for large and small series
	said := a.Coef[0]*x[0] + a.Coef[1]*x[1] + a.Coef[2]*x[2]
	var px [3]float64
	den := arimaForget * scale
	for i := range px {
		for k := range x {
			px[i] += a.Cov[i][k] * x[k]
		}
	}
	for i := range x {
		den += x[i] * px[i]
	}
	for i := range a.Coef {
		a.Coef[i] += px[i] / den * (y - said)
	}
	for i := range a.Cov {
		for k := range a.Cov[i] {
			a.Cov[i][k] = min((a.Cov[i][k]-px[i]*px[k]/den)/arimaForget, 1e3)
		}
	}
	a.Past[1], a.Past[0], a.Shock = a.Past[0], y, y-said
}

func (a *arima) Predict(ahead int) float64 {
	y1, y2, shock := a.Past[0], a.Past[1], a.Shock
	for range max(ahead, 1) {
		y := a.Coef[0]*y1 + a.Coef[1]*y2 + a.Coef[2]*shock
		if limit := 3 * math.Abs(a.Mean); math.Abs(y) > limit { // what was learned from little may not be stable
			y = math.Copysign(limit, y)
		}
		y1, y2, shock = y, y1, 0
	}
	return max(0, a.Mean+y1)
}

// seasonal is additive Holt-Winters: a level, a damped trend, and what each place in a period adds.
type seasonal struct {
	Period int       `json:"period"`
	N      int       `json:"n"`
	Level  float64   `json:"level"`
	Trend  float64   `json:"trend"`
	Season []float64 `json:"season,omitempty"`
}

const (
	levelWeight, trendWeight, seasonWeight = 0.25, 0.05, 0.3
	trendDamping                           = 0.9
)

func (s *seasonal) Add(v float64) {
	if s.N == 0 {
		s.Level = v
		s.Season = make([]float64, s.Period)
	}
	at := s.N % s.Period
	s.N++
	before := s.Level
	s.Level += s.Trend*trendDamping + levelWeight*(v-s.Season[at]-s.Level-s.Trend*trendDamping)
	s.Trend = trendDamping*s.Trend + trendWeight*(s.Level-before-trendDamping*s.Trend)
	s.Season[at] += seasonWeight * (v - s.Level - s.Season[at])
}

func (s *seasonal) Predict(ahead int) float64 {
	if s.N == 0 {
		return 0
	}
	v, damp := s.Level, trendDamping
	for range ahead {
		v += s.Trend * damp
		damp *= trendDamping
	}
	if s.N >= s.Period { // before, a place's part is noise
		v += s.Season[(s.N+ahead-1)%s.Period]
	}
	return max(0, v)
}

// kalman filters a level and a trend out of noise whose size it learns.
type kalman struct {
	N            int     `json:"n"`
	Level, Trend float64 `json:",omitempty"`
	P00, P01     float64 `json:",omitempty"`
	P11          float64 `json:",omitempty"`
	Noise        float64 `json:"noise"`
}

// How much level and trend may move in an interval, as parts of the noise's variance.
const (
	kalmanLevel = 0.05
	kalmanTrend = 0.0005
	kalmanDamp  = 0.97
)

func (k *kalman) Add(v float64) {
	if k.N++; k.N == 1 {
		k.Level, k.Noise = v, max(v, 1)
		k.P00, k.P11 = k.Noise, k.Noise/100
		return
	}
	level, trend := k.Level+k.Trend, k.Trend*kalmanDamp
	p00 := k.P00 + 2*k.P01 + k.P11 + kalmanLevel*k.Noise
	p01 := kalmanDamp * (k.P01 + k.P11)
	p11 := kalmanDamp*kalmanDamp*k.P11 + kalmanTrend*k.Noise
	off := v - level
	s := p00 + k.Noise
	g0, g1 := p00/s, p01/s
	k.Level, k.Trend = level+g0*off, trend+g1*off
	k.P00, k.P01, k.P11 = (1-g0)*p00, (1-g0)*p01, p11-g1*p01
	// The error's variance is that of the noise and of what is not known of the level.
	k.Noise = max(k.Noise+0.05*(off*off*k.Noise/s-k.Noise), 1e-3*max(1, k.Level))
}

func (k *kalman) Predict(ahead int) float64 {
	v, trend := k.Level, k.Trend
	for range ahead {
		v += trend
		trend *= kalmanDamp
	}
	return max(0, v)
}

// best asks the one that was least wrong of late.
type best struct {
	Smooth   smooth   `json:"smooth"`
	Constant constant `json:"constant"`
	Moving   moving   `json:"moving"`
	Arima    arima    `json:"arima"`
	Seasonal seasonal `json:"seasonal"`
	Kalman   kalman   `json:"kalman"`
	// Wrong are means of squared errors; Said what was forecast for the values to come, a ring; Last the last values.
	Wrong [6]float64                         `json:"wrong"`
	Said  [bestAhead + bestSpan/2][6]float64 `json:"said"`
	Last  [bestSpan]float64                  `json:"last"`
	N     int                                `json:"n"`
}

const (
	// A forecast so many intervals ahead is held against the mean of the bestSpan values around it: a single one is mostly noise.
	bestAhead  = 6
	bestSpan   = 6
	bestForget = 0.98
)

func newBest(period int) *best {
	return &best{Moving: moving{Width: 12}, Seasonal: seasonal{Period: max(period, 2)}}
}

func (b *best) all() [6]Predictor {
	return [6]Predictor{&b.Smooth, &b.Constant, &b.Moving, &b.Arima, &b.Seasonal, &b.Kalman}
}

// named is one of them, or best itself.
func (b *best) named(name string) Predictor {
	return map[string]Predictor{"constant": &b.Constant, "moving": &b.Moving, "smooth": &b.Smooth, "arima": &b.Arima, "seasonal": &b.Seasonal, "kalman": &b.Kalman, "best": b}[name]
}

func (b *best) Add(v float64) {
	b.Last[b.N%bestSpan] = v
	slot := b.N % len(b.Said)
	was := mean(b.Last[:])
	for i, p := range b.all() {
		if b.N >= bestSettled {
			off := b.Said[slot][i] - was
			b.Wrong[i] = bestForget*b.Wrong[i] + (1-bestForget)*off*off
		}
		p.Add(v)
		b.Said[slot][i] = p.Predict(bestAhead)
	}
	b.N++
}

// bestSettled is how many values each must have seen before it is judged, and asked.
const bestSettled = 3 * bestAhead

func (b *best) Predict(ahead int) float64 {
	all := b.all()
	least := 0
	if b.N >= 2*bestSettled {
		for i := range all {
			if b.Wrong[i] < b.Wrong[least] {
				least = i
			}
		}
	}
	return all[least].Predict(ahead)
}

// marshalState writes a planner's state down.
func marshalState(v any) ([]byte, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("write the planner's state: %w", err)
	}
	return data, nil
}

// checked is a planner's state that knows what no planner writes.
type checked interface{ check() error }

// restoreState reads what marshalState wrote. Something that is damaged changes nothing, so that the planner begins anew.
func restoreState[T any](data []byte, v *T) error {
	read := *v
	err := json.Unmarshal(data, &read)
	if c, ok := any(&read).(checked); ok && err == nil {
		err = c.check()
	}
	if err != nil {
		return fmt.Errorf("read the planner's state: %w; remove it to begin anew", err)
	}
	*v = read
	return nil
}

// countMost and timeMost are more than a planner can have counted.
const (
	countMost = 1 << 40
	timeMost  = 100 * 365 * 24 * time.Hour
)

func (b *best) check() error {
	s := &b.Seasonal
	for _, n := range []int{b.N, b.Smooth.N, b.Arima.N, s.N, b.Kalman.N} {
		if n < 0 || n > countMost {
			return fmt.Errorf("a predictor has seen %d values", n)
		}
	}
	switch {
	case b.Moving.Width < 1:
		return fmt.Errorf("the mean of %d values is asked for", b.Moving.Width)
	case s.Period < 2 || s.Period > periodMost || s.N > 0 && len(s.Season) != s.Period:
		return fmt.Errorf("a season of %d intervals has %d", s.Period, len(s.Season))
	}
	return nil
}

// periodMost is the longest season, in intervals.
const periodMost = 1 << 21

var _ = []Predictor{(*constant)(nil), (*moving)(nil), (*smooth)(nil), (*arima)(nil), (*seasonal)(nil), (*kalman)(nil), (*best)(nil)}
