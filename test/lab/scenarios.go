package main

// scenarios is what `make lab` runs, in this order. Add yours here: README.md says what the fields do.
var scenarios = []*scenario{
	{
		name: "verbs", about: "the shim over libibverbs, and what it counts",
		steps: []step{{test: "./cgo"}},
	},
	{
		name: "rdma", about: "a channel over soft RoCE: conformance, canaries, forced fences",
		steps: []step{{test: "./rdma"}},
	},
	{
		name: "transports", about: "the same conformance suite for the fake, shared memory and TCP, in the same machine",
		steps: []step{
			{test: "./transfer/transporttest", run: "Conformance"},
			{test: "./transfer/shm", run: "Conformance"},
			{test: "./transfer/tcp", run: "Conformance"},
		},
	},
}
