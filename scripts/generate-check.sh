#!/usr/bin/env bash
# Runs the generators and fails when they change a file.
set -euo pipefail

# What git sees before and after, so that it works in a tree with changes of its own too.
state() {
	git ls-files -co --exclude-standard -z | xargs -0 sha256sum 2>/dev/null || true
}
before=$(state)
go generate ./...
after=$(state)
if [ "$before" != "$after" ]; then
	echo "generate-check: generated files differ from what is committed; run make generate and commit:" >&2
	diff <(echo "$before") <(echo "$after") | sed -n 's/^[<>] [0-9a-f]*  /  /p' | sort -u >&2
	exit 1
fi
