// Command headrace is every part of Headrace in one binary: one file a subcommand, which turns flags into a part's
// configuration and has no logic of its own.
package main

import (
	"context"
	"os"

	"github.com/headrace/headrace/bench"
)

func main() {
	bench.MaybeChild() // a benchmark starts its daemons from this binary
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}
