#!/usr/bin/env bash
# Checks the Python package connectors/vllm: ruff, mypy --strict, pytest with daemons of bin/headrace, and that its wheel builds.
#   scripts/pytest.sh [arguments of pytest]
# The tools come into a virtual environment under the cache, pinned by hash. torch and vLLM are not among them: what needs
# these is skipped here and run by `make vllm`.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
package=$root/connectors/vllm
cache=${XDG_CACHE_HOME:-$HOME/.cache}/headrace
export HEADRACE_BIN=${HEADRACE_BIN:-$root/bin/headrace}
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
venv=$cache/venv-pytest-$(cat "$package/requirements.txt" - <<<"$version" | sha256sum | cut -c1-12)

if [ ! -x "$HEADRACE_BIN" ]; then
	echo "pytest: $HEADRACE_BIN is missing; run make build, or set HEADRACE_BIN" >&2
	exit 1
fi
if [ ! -e "$venv/complete" ]; then
	rm -rf "$venv"
	"$python" -m venv "$venv" || { echo "pytest: no virtual environment (apt-get install -y python3-venv)" >&2; exit 1; }
	"$venv/bin/pip" install -q --disable-pip-version-check --require-hashes -r "$package/requirements.txt"
	touch "$venv/complete"
fi
cd "$package"
export PYTHONDONTWRITEBYTECODE=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/ruff" check --no-cache -q --output-format concise .
"$venv/bin/mypy" --no-error-summary --cache-dir "$cache/mypy"
# A copy, since setuptools leaves folders beside what it builds.
cp -r headrace pyproject.toml README.md "$work"
"$venv/bin/pip" wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$work/wheel" "$work" || { echo "pytest: the wheel does not build" >&2; exit 1; }
[ "$("$venv/bin/python" -m zipfile -l "$work"/wheel/headrace-*.whl | grep -c "headrace/.*py")" -ge "$(ls headrace/*.py headrace/py.typed | wc -l)" ] || { echo "pytest: the wheel lacks files" >&2; exit 1; }
"$venv/bin/python" -m pytest "$@"
