// Command headrace is every part of Headrace in one binary: one file a subcommand, which turns flags into a part's
// configuration and has no logic of its own.
package main

import (
	"context"
	"os"

	"github.com/headrace/headrace/bench"
	"github.com/headrace/headrace/bench/routerbench"
	"github.com/headrace/headrace/bench/tracebench"
)

func main() {
	bench.MaybeChild() // a benchmark starts its daemons from this binary
	routerbench.MaybeChild()
	tracebench.MaybeChild()
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}
