//go:build !amd64

package kernel

func native() []*Impl { return nil }

func pause(uint64) {}
