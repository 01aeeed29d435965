package body

import "golang.org/x/sys/cpu"

// wide tells that 32 bytes can be looked at in one go.
var wide = cpu.X86.HasAVX2

// plainAVX2 is skipPlain from 0 over n bytes, a multiple of 32, which it returns when it finds nothing.
//
//go:noescape
func plainAVX2(b *byte, n int) int

// skipWide is skipPlain as far as there are 32 bytes at once.
func skipWide(b []byte, i int) int {
	if n := (len(b) - i) &^ 31; n > 0 && wide {
		return i + plainAVX2(&b[i], n)
	}
	return i
}
