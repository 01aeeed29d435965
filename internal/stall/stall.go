// Package stall tells tests that hold something to a time how long the machine kept this process from running meanwhile:
// on a machine that is busy with other things a limit alone says nothing. It must not know what is measured.
package stall

import (
	"sync/atomic"
	"testing"
	"time"
)

const (
	// every is how often the clock is looked at.
	every = 10 * time.Millisecond
	// usual is what a look may be late on a machine that has room.
	usual = 10 * time.Millisecond
	// others is how many times this process's loss is given to a limit: what it waits for are other processes of the same
	// machine, each of which loses about as much.
	others = 3
)

// Watch begins to watch, until the test ends. What it returns may be called by several goroutines at a time: it is what a
// limit is to be longer by, because of what this process has lost until then.
func Watch(t testing.TB) (extra func() time.Duration) {
	extra, end := Begin()
	t.Cleanup(end)
	return extra
}

// Begin is Watch until end is called, once.
func Begin() (extra func() time.Duration, end func()) {
	var lost atomic.Int64
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for last := time.Now(); ; {
			select {
			case <-done:
				return
			case <-time.After(every):
			}
			now := time.Now()
			if late := now.Sub(last) - every; late > usual {
				lost.Add(int64(late))
			}
			last = now
		}
	}()
	return func() time.Duration { return others * time.Duration(lost.Load()) }, func() {
		close(done)
		<-ended
	}
}
