# The targets a person types. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
GOLANGCI_LINT_VERSION := v2.15.0
FUZZTIME ?= 10s

# A C compiler makes cgo possible, which only RDMA and the race detector need.
CC_FOUND := $(shell command -v $${CC:-gcc} || command -v cc || command -v clang)
ifndef CGO_ENABLED
CGO_ENABLED := $(if $(CC_FOUND),1,0)
endif
export CGO_ENABLED
RACE := $(if $(filter 1,$(CGO_ENABLED)),-race)

# Go's build cache does not see system headers come and go; a flag of its own makes it look again.
VERBS_FOUND := $(wildcard /usr/include/infiniband/verbs.h /usr/local/include/infiniband/verbs.h)
ifneq ($(VERBS_FOUND),)
export CGO_CPPFLAGS += -DHEADRACE_VERBS_HEADERS_SEEN
endif

LDFLAGS := -s -w -X github.com/headrace/headrace/internal/version.number=$(VERSION)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## build bin/headrace
	@$(if $(filter 0,$(CGO_ENABLED)),echo "building without cgo: no C compiler (apt-get install -y gcc libc6-dev); the binary has no RDMA",true)
	@$(if $(filter 1,$(CGO_ENABLED)),$(if $(VERBS_FOUND),true,echo "building without libibverbs' headers (apt-get install -y libibverbs-dev); the binary has no RDMA"),true)
	go build -ldflags '$(LDFLAGS)' -o bin/headrace ./cmd/headrace

.PHONY: up
up: deps build ## build, fetch the default model and serve it at http://127.0.0.1:8000/v1
	exec bin/headrace up $(ARGS)

.PHONY: model
model: deps build ## fetch the default model
	bin/headrace model

.PHONY: deps
deps: ## install missing system packages, or name them in one line
	scripts/deps.sh run

.PHONY: deps-test deps-lab deps-vllm
deps-test deps-lab deps-vllm: deps-%:
	scripts/deps.sh $*

.PHONY: test
test: deps-test build model generate-check checks ## run everything

.PHONY: checks
checks: lint unit nocgo # what leaves the tree as it is: others may read it meanwhile
	@$(MAKE) --no-print-directory -j2 pytest e2e # the one computes and the other waits, mostly

.PHONY: unit
# Else each test program, and each process that it starts, sleeps for a second before it ends.
unit: export GORACE ?= atexit_sleep_ms=50
unit: model ## run the Go tests under the race detector
	go test $(RACE) -shuffle=on -timeout 20m ./...

.PHONY: nocgo
nocgo: ## build everything without cgo, and test what differs
	CGO_ENABLED=0 go build ./...
	CGO_ENABLED=0 go test ./cgo ./internal/doctor

.PHONY: pytest
pytest: deps-test build ## check the Python package connectors/vllm (ARGS of pytest)
	scripts/pytest.sh $(ARGS)

.PHONY: e2e
e2e: deps-test build model ## drive the real binary end to end, with the openai client too
	cd test/e2e && HEADRACE_E2E=1 HEADRACE_BIN=$(CURDIR)/bin/headrace go test -count=1 -timeout 40m # without a package: so it prints its tables

.PHONY: proof
proof: deps-test build model ## everything at full length: 1,000 cancels of each kind, 10,000 over all dialects, each kill 20 times, 2,000 streams for 5 minutes, all prompts
	HEADRACE_FULL=1 go test -count=1 -timeout 60m ./transfer/...
	HEADRACE_FULL=1 go test -count=1 -timeout 60m -run TestCancelAnywhere -v ./router
	HEADRACE_E2E=1 HEADRACE_FULL=1 HEADRACE_BIN=$(CURDIR)/bin/headrace go test -count=1 -timeout 120m -v ./test/e2e
	scripts/deps.sh lab
	go run ./test/lab -full
	scripts/deps.sh vllm
	HEADRACE_FULL=1 scripts/vllm.sh

.PHONY: lab
lab: deps-lab ## prove RDMA over soft RoCE in emulated machines (ARGS="-list", ARGS="-scenario NAME -v -run X")
	go run ./test/lab $(ARGS)

.PHONY: vllm
vllm: build model deps-vllm ## check with a real vLLM on the CPU: makes its environment first (ARGS="-run X -v")
	scripts/vllm.sh $(ARGS)

.PHONY: vllm-ttft
vllm-ttft: build model deps-vllm ## measure the time to the first token: disaggregated, aggregated, NixlConnector
	export HEADRACE_VLLM=$$(scripts/vllm-env.sh) HEADRACE_BIN=$(CURDIR)/bin/headrace; go run ./test/vllm/ttft $(ARGS)

.PHONY: gpu
gpu: ## prove on this host's GPU what is only simulated elsewhere; fails where there is none
	HEADRACE_GPU=1 go test -count=1 -v -run 'TestGPU|TestProbeCUDA' ./cgo ./worker/gpumem $(ARGS)

.PHONY: lint
lint: ## run golangci-lint, or go vet where it cannot be had
	scripts/lint.sh $(GOLANGCI_LINT_VERSION)

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME
	scripts/fuzz.sh $(FUZZTIME)

.PHONY: bench
bench: build ## measure transfers beside the machine's limits (ARGS=--peers: and beside Mooncake and NIXL)
	scripts/deps.sh bench
	bin/headrace bench transfer $(ARGS)

.PHONY: bench-engine
bench-engine: build model ## measure the engine beside llama.cpp on the same file
	scripts/bench-engine.sh $(ARGS)

.PHONY: generate
generate: ## regenerate committed code
	go generate ./...

.PHONY: generate-check
generate-check: ## check that committed code is what its generators write
	scripts/generate-check.sh

.PHONY: clean
clean: ## remove what was built
	rm -rf bin dist
