package leaktest

import (
	"strings"
	"testing"
)

func waits(until chan struct{}) { <-until }

func TestGoroutines(t *testing.T) {
	parts := []string{"leaktest.waits"}
	until := make(chan struct{})
	began := make(chan struct{})
	go func() {
		close(began)
		waits(until)
	}()
	<-began
	for len(goroutines(parts)) == 0 { // it may not be in there yet
	}
	if got := goroutines(parts); len(got) != 1 || !strings.Contains(got[0], "leaktest.waits") {
		t.Errorf("%q", got)
	}
	close(until)
	if left := Left(parts, func() string { return "" }); left != "" {
		t.Error(left)
	}
}
