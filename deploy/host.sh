#!/usr/bin/env bash
# One host of a Headrace cluster in the foreground: a node daemon, one engine for each role that is named, and the router
# where "router" is. Ctrl-C, or the end of any of them, stops all in order.
#
#   ETCD=10.0.0.1:2379 HOST=10.0.0.7 deploy/host.sh /models/llama prefill router      # on one host
#   ETCD=10.0.0.1:2379 HOST=10.0.0.8 deploy/host.sh /models/llama decode              # on the other
#   ETCD=127.0.0.1:2379 deploy/host.sh /models/llama prefill decode router            # one host
#
# HOST    this host's address for the others (127.0.0.1)
# KEY     the cluster's key, the same file everywhere (cluster.key in DATA, made when it is missing)
# DATA    keys and sockets (~/.local/state/headrace-host)
# ENGINE  vllm, vllm-nixl or vllm-plain (vllm); or COMMAND, a command line with placeholders, and DIALECT
# ARGS    more arguments of every engine, as a shell splits them (none)
# GPUS    what the engines get, one word each: "0 1" or "0,1 2,3" for two ranks each (none: all GPUs, or the CPU)
# PORT    of the router; the daemon has the next one, the engines those from PORT + 10 on (8000)
set -euo pipefail

[ $# -ge 2 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
model=$1
shift
: "${ETCD:?say where etcd is, as ETCD=10.0.0.1:2379}"
host=${HOST:-127.0.0.1} port=${PORT:-8000} data=${DATA:-${XDG_STATE_HOME:-$HOME/.local/state}/headrace-host}
mkdir -p "$data" && chmod 700 "$data"
key=${KEY:-$data/cluster.key}
if [ ! -e "$key" ]; then
	(umask 077 && openssl rand -hex 32 >"$key")
	echo "made $key; copy it to every other host before something is started there" >&2
fi
read -ra gpus <<<"${GPUS:-}"
read -ra args <<<"${ARGS:-}"
headrace=${HEADRACE:-headrace}

pids=()
start() {
	"$@" &
	pids+=($!)
}
# Routers first and daemons last, so that requests can end: the other way round from the start.
finish() {
	trap - EXIT INT TERM
	local i
	for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
		kill -TERM "${pids[i]}" 2>/dev/null || true
		wait "${pids[i]}" 2>/dev/null || true
	done
}
trap finish EXIT
trap 'finish; exit 0' INT TERM

start "$headrace" node --id "node-$host" --etcd "$ETCD" --listen "$host:$((port + 1))" --socket "$data/node.sock" --cluster-key-file "$key"
n=0 router=
for part in "$@"; do
	case $part in
	router) router=yes ;;
	prefill | decode | both)
		what=(--engine "${ENGINE:-vllm}")
		[ -z "${COMMAND:-}" ] || what=(--command "$COMMAND" --dialect "${DIALECT:-openai}")
		[ -z "${gpus[n]:-}" ] || what+=(--gpus "${gpus[n]}")
		start "$headrace" engine "${what[@]}" --id "$part-$host-$n" --role "$part" --model "$model" --etcd "$ETCD" \
			--listen "$host:$((port + 10 + n))" --socket "$data/node.sock" -- "${args[@]}"
		n=$((n + 1))
		;;
	*)
		echo "$part: use prefill, decode, both or router" >&2
		exit 2
		;;
	esac
done
if [ -n "$router" ]; then
	start "$headrace" router --id "router-$host" --etcd "$ETCD" --listen "$host:$port" --cluster-key-file "$key"
fi
wait -n # whichever ends first
