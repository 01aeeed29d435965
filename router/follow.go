package router

import (
	"os"
	"time"
)

// lookPeriod is how often the files are looked at that may change while the router runs.
const lookPeriod = 2 * time.Second

// follow looks from time to time until done.
func follow(done <-chan struct{}, look func()) {
	t := time.NewTicker(lookPeriod)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			look()
		case <-done:
			return
		}
	}
}

// sameFile tells whether a path names the file that it did, unchanged. nil is none.
func sameFile(is, was os.FileInfo) bool {
	if is == nil || was == nil {
		return is == was
	}
	return os.SameFile(is, was) && is.ModTime().Equal(was.ModTime()) && is.Size() == was.Size()
}
