package pairing

import (
	"fmt"
	"slices"
	"strings"
)

const (
	// kvFull is the usage from which on a request that comes has to wait for blocks, or takes another's.
	kvFull = 0.97
	// waitingLong is a queue that no engine works off in the second that the figures are old.
	waitingLong = 16
)

// strain says why a worker is to be taken last, by what it said of itself; "" if it is not.
func (c *Candidate) strain() string {
	switch e := &c.Engine; {
	case !e.Known:
		return ""
	case e.KVUsage >= kvFull:
		return "its KV cache is full"
	case e.Waiting >= waitingLong:
		return "its queue is long"
	}
	return ""
}

// foreign is how many requests others than this router gave the worker.
func (c *Candidate) foreign() int64 {
	if !c.Engine.Known {
		return 0
	}
	return c.Engine.Foreign
}

// strained puts in words which of those chosen are strained.
func strained(chosen ...*Candidate) string {
	if !slices.ContainsFunc(chosen, func(c *Candidate) bool { return c.strain() != "" }) {
		return ""
	}
	var b strings.Builder
	for _, c := range chosen {
		if why := c.strain(); why != "" {
			fmt.Fprintf(&b, "; %s all the same: %s (%.0f %%, %d waiting)", c.ID, why, 100*max(c.Engine.KVUsage, 0), c.Engine.Waiting)
		}
	}
	return b.String()
}
