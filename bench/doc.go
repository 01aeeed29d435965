// Package bench measures Headrace beside what it should be held against, in the same run and alternating, because figures
// of one machine move by tens of per cent between runs: only ratios within a run mean anything.
//
// Transfer moves scattered blocks from one engine's memory to another's through real node daemons in processes of their
// own, beside plain loops over the same kind of blocks (limits/limits.c, or loops in Go where there is no C compiler).
package bench
