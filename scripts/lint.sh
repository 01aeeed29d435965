#!/usr/bin/env bash
# Runs golangci-lint at the version given, built once into the user's cache; go vet where it cannot be had.
set -euo pipefail

version=$1
dir=${XDG_CACHE_HOME:-$HOME/.cache}/headrace/tools/golangci-lint-$version-$(go env GOVERSION)
if [ ! -x "$dir/golangci-lint" ]; then
	echo "lint: building golangci-lint $version (once)"
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	# In a folder of its own, so that this module's requirements do not change.
	if ! (cd "$work" && GOBIN=$work CGO_ENABLED=0 GOFLAGS='' go install "github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$version" >"$work/log" 2>&1); then
		tail -n 3 "$work/log" >&2
		echo "lint: golangci-lint cannot be had here, running go vet alone"
		exec go vet ./...
	fi
	mkdir -p "$dir"
	mv "$work/golangci-lint" "$dir/.new.$$"
	mv "$dir/.new.$$" "$dir/golangci-lint"
fi
"$dir/golangci-lint" run --timeout 15m ./...
