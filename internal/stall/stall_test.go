package stall

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		extra := Watch(t)
		time.Sleep(time.Minute) // a bubble's clock loses nothing
		if d := extra(); d != 0 {
			t.Errorf("%v were lost", d)
		}
	})
}
