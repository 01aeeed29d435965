// Package vllm checks Headrace beside a real vLLM, unmodified, on the CPU: engines, daemons and a router as processes of
// their own, requests through the router, and an aggregated vLLM that says what is right. It must not know how the
// connector works, only what a client, an operator and the engines' own metrics can see.
//
// The tests run where HEADRACE_VLLM names the folder that scripts/vllm-env.sh has made; `make vllm` does both.
package vllm
