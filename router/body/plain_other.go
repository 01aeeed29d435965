//go:build !amd64

package body

func skipWide(_ []byte, i int) int { return i }
