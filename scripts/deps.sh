#!/usr/bin/env bash
# Installs the system packages that are missing, or names them in one line with the command that installs them.
#   scripts/deps.sh run     what `make up` needs
#   scripts/deps.sh test    what the tests need as well
#   scripts/deps.sh bench   what the benchmarks measure themselves beside
#   scripts/deps.sh lab     what the soft-RoCE lab needs (make lab)
#   scripts/deps.sh vllm    what a real vLLM on the CPU needs (make vllm)
set -euo pipefail

level=${1:-run}
model=${XDG_CACHE_HOME:-$HOME/.cache}/headrace/models/SmolLM2-135M-Instruct.Q4_1.gguf
needed=()
wished=()

if ! command -v go >/dev/null; then
	echo "deps: Go is missing; install Go 1.26 or newer and put it on the PATH" >&2
	exit 1
fi
compiles() { echo 'int main(void){return 0;}' | "${CC:-cc}" -x c -o /dev/null - 2>/dev/null || echo 'int main(void){return 0;}' | gcc -x c -o /dev/null - 2>/dev/null; }
has_pip() { pip --version >/dev/null 2>&1 || pip3 --version >/dev/null 2>&1 || python3 -m pip --version >/dev/null 2>&1 || command -v uv >/dev/null; }
has_venv() { python3 -c 'import venv, ensurepip' 2>/dev/null; }

if [ "$level" != lab ] && [ ! -s "$model" ]; then has_pip || needed+=(python3-pip); fi
if [ "$level" = test ]; then
	compiles || needed+=(gcc libc6-dev)
	has_venv || needed+=(python3-venv)
	command -v git >/dev/null || needed+=(git)
	# The eBPF objects are committed; with this clang they can be made anew and compared (transfer/telemetry/gen).
	{ command -v clang-14 && command -v llvm-strip-14; } >/dev/null || wished+=(clang-14 llvm-14)
elif [ "$level" != lab ]; then
	compiles || wished+=(gcc libc6-dev)
fi
if [ "$level" = bench ]; then
	command -v iperf3 >/dev/null || wished+=(iperf3)
	for proxy in nginx haproxy; do # beside the router
		[ -n "$(PATH=$PATH:/usr/sbin:/sbin command -v "$proxy")" ] || wished+=("${proxy/nginx/nginx-light}")
	done
	has_venv || wished+=(python3-venv)
fi
if [ "$level" = vllm ]; then
	compiles || needed+=(gcc libc6-dev)
	{ command -v nm && command -v readelf; } >/dev/null || needed+=(binutils)
	command -v flock >/dev/null || needed+=(util-linux)
	compgen -G '/usr/lib/*/libnuma.so.1' >/dev/null || compgen -G '/usr/lib*/libnuma.so.1' >/dev/null || needed+=(libnuma1)
	# Its wheels are for CPython 3.11: Debian 12's own.
	has_python311() { for p in python3.11 python3; do "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && return; done; return 1; }
	has_python311 || needed+=(python3.11 python3.11-venv)
fi
if [ "$level" = lab ]; then
	compiles || needed+=(gcc libc6-dev)
	has() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ]; }
	has qemu-system-x86_64 || needed+=(qemu-system-x86)
	has xz || needed+=(xz-utils)
	{ has rdma && has tc; } || needed+=(iproute2)
	has ib_write_bw || needed+=(perftest)
	has busybox || needed+=(busybox-static)
	has setcap || needed+=(libcap2-bin)
	has ibv_devinfo || needed+=(ibverbs-utils)
	[ -e /usr/include/infiniband/verbs.h ] || needed+=(libibverbs-dev)
	compgen -G '/usr/lib/*/libibverbs/librxe-rdmav*.so' >/dev/null || needed+=(ibverbs-providers)
fi
# Headers make a build that can use RDMA; nothing else needs them.
[ "$level" = lab ] || [ -e /usr/include/infiniband/verbs.h ] || wished+=(libibverbs-dev)

all=("${needed[@]}" "${wished[@]}")
[ ${#all[@]} -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	export DEBIAN_FRONTEND=noninteractive
	echo "deps: installing ${all[*]}"
	log=$(mktemp)
	trap 'rm -f "$log"' EXIT
	install() { apt-get install -y --no-install-recommends "$@" >"$log" 2>&1 </dev/null; }
	install "${all[@]}" && exit 0
	apt-get update >"$log" 2>&1 </dev/null || true
	install "${all[@]}" && exit 0
	# What is only wished for must not stand in the way.
	if [ ${#needed[@]} -eq 0 ]; then
		echo "deps: going on without ${wished[*]}"
		exit 0
	fi
	install "${needed[@]}" && exit 0
	tail -n 5 "$log" >&2
fi
if [ ${#needed[@]} -gt 0 ]; then
	echo "deps: missing ${needed[*]}; run: apt-get install -y ${all[*]}" >&2
	exit 1
fi
echo "deps: going on without ${wished[*]} (to have them: apt-get install -y ${wished[*]})"
