#!/usr/bin/env bash
# Runs the checks with a real vLLM: scripts/vllm.sh [arguments of go test]. HEADRACE_FULL=1 runs the counts of the proof.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

HEADRACE_VLLM=$(scripts/vllm-env.sh)
export HEADRACE_VLLM HEADRACE_BIN=${HEADRACE_BIN:-$PWD/bin/headrace}
if [ -z "$*" ]; then
	# The connector's tests that are skipped where there is no vLLM.
	mapfile -t tests < <(grep -l importorskip connectors/vllm/tests/test_*.py)
	[ ${#tests[@]} -eq 0 ] || PYTHONPATH=$HEADRACE_VLLM/tools PYTHONDONTWRITEBYTECODE=1 VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 \
		"$HEADRACE_VLLM/venv/bin/python" -m pytest -q -p no:cacheprovider "${tests[@]}"
	set -- -v # its lines are the figures
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
(cd test/vllm && exec go test -count=1 -timeout 90m "$@") | tee "$log" || status=$? # in the folder: so it prints as it goes
[ "$status" = 0 ] || awk -f scripts/failed.awk "$log"
exit "$status"
