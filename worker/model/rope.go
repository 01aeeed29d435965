package model

import "math"

// setRope fixes the rotary frequencies: base^(-2i/d), divided by the file's factors if it has them. They and the
// angles are computed in float64 and rounded once, when the table is filled.
func (m *Model) setRope(factors []float32) {
	m.ropeFreqs = make([]float64, m.HeadDim/2)
	for i := range m.ropeFreqs {
		m.ropeFreqs[i] = math.Pow(float64(m.RopeBase), -2*float64(i)/float64(m.HeadDim))
		if factors != nil {
			m.ropeFreqs[i] /= float64(factors[i])
		}
	}
}

// needRope fills the table up to position n-1.
func (m *Model) needRope(n int) {
	per := m.HeadDim
	if have := len(m.rope) / per; n > have {
		n = min(max(n, have+1024), max(m.Context, n))
		table := make([]float32, n*per)
		copy(table, m.rope)
		for pos := have; pos < n; pos++ {
			for i, f := range m.ropeFreqs {
				sin, cos := math.Sincos(float64(pos) * f)
				table[pos*per+2*i], table[pos*per+2*i+1] = float32(cos), float32(sin)
			}
		}
		m.rope = table
	}
}

// rotate turns pairs (2i, 2i+1) of src into dst: GGUF's Llama files have their query and key rows permuted so that
// neighbours form the pairs. The products are rounded before they are added, on every processor.
func rotate(dst, src, table []float32, scale float32) {
	for i := 0; i+1 < len(src); i += 2 {
		a, b, cos, sin := src[i], src[i+1], table[i], table[i+1]
		dst[i] = (float32(a*cos) - float32(b*sin)) * scale
		dst[i+1] = (float32(a*sin) + float32(b*cos)) * scale
	}
}
