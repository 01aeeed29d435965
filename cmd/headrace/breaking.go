package main

import (
	"time"

	"github.com/spf13/pflag"

	"github.com/headrace/headrace/router"
)

// addBreaking is for settings about workers that fail.
func addBreaking(fs *pflag.FlagSet, b *router.Breaking) {
	fs.IntVar(&b.Row, "breaker-failures", 5, "errors in a row after which a worker is left alone (one that does not answer: after one)")
	fs.Float64Var(&b.Share, "breaker-share", 0.5, "part of the attempts of the last seconds, 0 to 1, that fail before a worker is left alone (of 10 attempts and more)")
	fs.DurationVar(&b.OpenMax, "breaker-open-max", 10*time.Second, "longest that a worker is left alone before a request tries it again (at first 1s, then twice as long each time)")
	fs.Float64Var(&b.SlowFactor, "eject-slow", 0, "times the median of its peers that a worker must take for first tokens to be left alone, 1.5 or more (0: off)")
	fs.Float64Var(&b.EjectShare, "eject-share", 0.5, "part of the workers of a model and role, 0 to 1 but at least one worker, that may be left alone for errors, or for being slow, at once")
	fs.Float64Var(&b.RetryShare, "retry-share", 0.2, "retries after errors, in relation to the requests of the last seconds (-1: none)")
	fs.Float64Var(&b.RetryRate, "retry-rate", 10, "retries after errors that may be made a second besides (-1: none)")
}
