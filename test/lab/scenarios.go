package main

import "time"

// scenarios is what `make lab` runs, in this order. Add yours here: README.md says what the fields do.
var scenarios = []*scenario{
	{
		name: "verbs", about: "the shim over libibverbs, and what it counts",
		light:  true,
		steps:  []step{{test: "./cgo"}, {test: "./internal/memfd", run: "Huge"}},
		absent: "CUDA|GPU", // no GPU is emulated, and no C compiler there builds the stand-in for its driver
	},
	{
		name: "rdma", about: "a channel over soft RoCE: conformance, canaries, forced fences",
		light: true, timeout: 30 * time.Minute, // the suite twice, writing and reading
		steps: []step{{test: "./rdma", skip: "Rails|OfAUser"}}, // the latter is the other process of a test
	},
	{
		name: "rails", about: "two rails: shares, ports that go down and come back, TCP as the last rail", rails: 2,
		steps: []step{{test: "./rdma", run: "Rails"}},
	},
	{
		name: "transports", about: "the same conformance suite for the fake, shared memory and TCP, in the same machine",
		light: true,
		steps: []step{
			{test: "./transfer/transporttest", run: "Conformance", short: true},
			{test: "./transfer/shm", run: "Conformance", short: true},
			{test: "./transfer/tcp", run: "Conformance$", short: true},
		},
	},
	{
		name: "doctor", about: "broken hosts, and what `headrace doctor` says and does about them",
		programs: []string{"busybox", "dash", "setcap"}, headrace: true, light: true,
		steps: []step{{test: "./test/broken", run: "BrokenHosts|FaultsAreTold"}},
	},
	{
		name: "doctor-vf", about: "a card without its virtual functions, and what `headrace doctor` says and does about it",
		light: true, rails: -1, emulates: "igb", headrace: true, modules: []string{"igb", "igbvf"}, programs: []string{"busybox", "dash"},
		qemu:  []string{"-device", "pcie-root-port,id=port0,bus=pcie.0,chassis=1,slot=1", "-netdev", "hubport,id=hub0,hubid=0", "-device", "igb,bus=port0,netdev=hub0,mac=52:54:00:01:00:01,romfile="},
		env:   []string{"LAB_PF=eth0"},
		steps: []step{{test: "./test/broken", run: "VirtualFunctions"}},
	},
	{
		name: "doctor-peer", about: "two hosts that do not fit, and what `headrace doctor --peer` says and does about them", machines: 2,
		programs: []string{"busybox", "dash"}, modules: []string{"act_police"}, headrace: true,
		steps: []step{
			{on: 1, test: "./internal/doctor", run: "WritesOverRDMA"},
			{on: 1, test: "./test/broken", run: "TwoHosts"}, {on: 2, test: "./test/broken", run: "FarHost"},
		},
	},
	{
		name: "telemetry", about: "eBPF's counts of TCP lanes under loss beside TCP_INFO",
		steps: []step{{test: "./transfer/telemetry", skip: "RoCE"}},
	},
	{
		name: "telemetry-roce", about: "eBPF's counts of soft RoCE under loss beside hw_counters", machines: 2,
		steps: []step{{test: "./transfer/telemetry", run: "RoCE"}},
	},
	{
		name: "bench", about: "rates and latencies beside perftest (-args \"--part sizes --block 16384,65536 --rounds 7\")", rails: 2,
		programs: []string{"ib_write_bw", "ib_read_bw", "ib_write_lat"}, headrace: true,
		steps:   []step{{command: []string{"/bin/headrace", "bench", "transfer", "--transport", "rdma", "--region", "16MiB"}, args: []string{"--quick", "--part", "sizes,latency"}}},
		timeout: 25 * time.Minute, // two on a machine of its own
	},
	{
		name: "vf", about: "rails over SR-IOV virtual functions that the daemon makes of an emulated igb and puts back",
		light: true, rails: -1, emulates: "igb", headrace: true, modules: []string{"igb", "igbvf"},
		qemu:  []string{"-device", "pcie-root-port,id=port0,bus=pcie.0,chassis=1,slot=1", "-netdev", "hubport,id=hub0,hubid=0", "-device", "igb,bus=port0,netdev=hub0,mac=52:54:00:01:00:01,romfile="},
		setup: [][]string{{"ip", "link", "set", "eth0", "mtu", "2000", "up"}},
		env:   []string{"LAB_PF=eth0"},
		steps: []step{{test: "./test/lab/vf"}},
	},
	{
		name: "twin", about: "the conformance suite of a channel between two machines, over RDMA and TCP",
		machines: 2, timeout: 25 * time.Minute, steps: []step{{test: "./test/lab/twin", run: "Conformance"}},
	},
	{
		name: "wires", about: "transfers over wires that lose, delay, reorder, double and alter packets",
		machines: 2, timeout: 25 * time.Minute, steps: []step{{test: "./test/lab/twin", run: "BadWires|Canaries"}},
	},
	{
		name: "twin-rails", about: "two rails between two machines: late packets of a dead one, and a slow one",
		machines: 2, rails: 2, steps: []step{{test: "./test/lab/twin", run: "Rails"}},
	},
	{
		name: "served", about: "a model served by two machines, KV cache over RDMA: right answers, also when parts die",
		machines: 2, headrace: true, timeout: 25 * time.Minute, steps: []step{{test: "./test/lab/served"}},
	},
}
