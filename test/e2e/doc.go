// Package e2e drives the real binary as a user does: it starts `headrace up`, talks to it over HTTP, kills, stops and
// restarts its processes, and looks at what is left. There is nothing to import here.
//
// Without HEADRACE_E2E=1 only a smoke test runs, so that `go test ./...` stays quick; HEADRACE_FULL=1 repeats each kill
// 20 times instead of 2 and keeps 2,000 streams open for five minutes instead of 200 for a quarter of one. HEADRACE_BIN names a binary to use, else one is built (HEADRACE_RACE=1: with -race).
// HEADRACE_E2E_LOGS=1 prints the processes' logs also when nothing failed.
//
// The tests must not know how a part works: what they see is HTTP, the registry, the debug endpoints of the node
// daemons and /proc.
package e2e
