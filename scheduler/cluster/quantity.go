package cluster

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// Bytes is an amount of memory. Written as a whole number of bytes or with a unit: B, kB, MB, GB, TB (powers of 1000),
// KiB, MiB, GiB, TiB (powers of 1024), and Kubernetes' Ki, Mi, Gi, Ti.
type Bytes int64

// Limits of one amount: sums over layers, devices and tasks stay inside 64 bits.
const (
	bytesMax = 1 << 48
	milliMax = 1e12
)

// byteUnits are tried in this order, so a longer unit comes before the one that it ends with.
var byteUnits = []struct {
	suffix string
	bytes  int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40},
	{"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1},
}

// UnmarshalText reads a size; it is exact (1.5GiB is 1610612736) and refuses what is negative or not whole.
func (b *Bytes) UnmarshalText(text []byte) error {
	number, factor := strings.TrimSpace(string(text)), int64(1)
	for _, u := range byteUnits {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, factor = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	n, err := scaled(number, factor)
	if err != nil {
		return fmt.Errorf("%q is no amount of memory: %w; write bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB or TB", text, err)
	}
	if n > bytesMax {
		return fmt.Errorf("%q is more memory than there is; write at most 256TiB", text)
	}
	*b = Bytes(n)
	return nil
}

// Milli is thousandths: of a processor core, of a card. Written as a number (2, 0.5) or in thousandths (500m).
type Milli int64

// UnmarshalText reads a number of whole units or of thousandths.
func (m *Milli) UnmarshalText(text []byte) error {
	number, factor := strings.TrimSpace(string(text)), int64(1000)
	if rest, ok := strings.CutSuffix(number, "m"); ok {
		number, factor = rest, 1
	}
	n, err := scaled(number, factor)
	if err != nil {
		return fmt.Errorf("%q is no amount: %w; write a number such as 2, 0.5 or 500m", text, err)
	}
	if n > milliMax {
		return fmt.Errorf("%q is more than there is; write at most 1000000000", text)
	}
	*m = Milli(n)
	return nil
}

// MarshalJSON writes units, not thousandths.
func (m Milli) MarshalJSON() ([]byte, error) { return []byte(m.String()), nil }

// String is the shortest decimal number of units.
func (m Milli) String() string { return strconv.FormatFloat(float64(m)/1000, 'f', -1, 64) }

// scaled parses a decimal number and multiplies it exactly.
func scaled(number string, factor int64) (int64, error) {
	r, err := decimal(number)
	if err != nil {
		return 0, err
	}
	r.Mul(r, new(big.Rat).SetInt64(factor))
	switch {
	case r.Sign() < 0:
		return 0, fmt.Errorf("it is negative")
	case !r.IsInt():
		return 0, fmt.Errorf("it is not a whole number of the smallest unit")
	case !r.Num().IsInt64():
		return 0, fmt.Errorf("it is larger than %d", int64(math.MaxInt64))
	}
	return r.Num().Int64(), nil
}

// decimalChars bounds what is parsed: big.Rat would make 1e999999999 into a number of a gigabyte.
const decimalChars = 40

// decimal reads digits with at most one point and a sign.
func decimal(s string) (*big.Rat, error) {
	if s == "" || len(s) > decimalChars || strings.Trim(s, "0123456789.-+") != "" {
		return nil, fmt.Errorf("it is not a decimal number")
	}
	r, ok := new(big.Rat).SetString(s)
	if !ok {
		return nil, fmt.Errorf("it is not a decimal number")
	}
	return r, nil
}

// Ratio is an exact fraction: 1.1 is eleven tenths and not the float beside it. Written 0.25 or 1/4. The zero value is 0.
type Ratio struct{ r *big.Rat }

// UnmarshalText reads a decimal number or a fraction.
func (q *Ratio) UnmarshalText(text []byte) error {
	num, den, frac := strings.Cut(strings.TrimSpace(string(text)), "/")
	a, err := decimal(strings.TrimSpace(num))
	if err == nil && frac {
		var b *big.Rat
		if b, err = decimal(strings.TrimSpace(den)); err == nil {
			if b.Sign() == 0 {
				err = fmt.Errorf("it divides by zero")
			} else {
				a.Quo(a, b)
			}
		}
	}
	if err == nil && a.Sign() < 0 {
		err = fmt.Errorf("it is negative")
	}
	if err != nil {
		return fmt.Errorf("%q is no ratio: %w; write 0.25 or 1/4", text, err)
	}
	q.r = a
	return nil
}

// Rat is a copy as a big.Rat.
func (q Ratio) Rat() *big.Rat {
	if q.r == nil {
		return new(big.Rat)
	}
	return new(big.Rat).Set(q.r)
}

// Set says whether it is more than zero.
func (q Ratio) Set() bool { return q.r != nil && q.r.Sign() > 0 }

// String is the fraction.
func (q Ratio) String() string { return q.Rat().RatString() }
