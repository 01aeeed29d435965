#!/usr/bin/env bash
# Runs the checks with a real vLLM: scripts/vllm.sh [arguments of go test]. HEADRACE_FULL=1 runs the counts of the proof.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

HEADRACE_VLLM=$(scripts/vllm-env.sh)
export HEADRACE_VLLM HEADRACE_BIN=${HEADRACE_BIN:-$PWD/bin/headrace}
if [ -z "$*" ]; then
	# The connector's own tests, here beside the vLLM that they otherwise skip without.
	PYTHONPATH=$HEADRACE_VLLM/tools VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 \
		"$HEADRACE_VLLM/venv/bin/python" -m pytest -q -p no:cacheprovider connectors/vllm/tests
fi
cd test/vllm && exec go test -count=1 -timeout 90m "$@" # in the folder: so it prints as it goes
