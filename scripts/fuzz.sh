#!/usr/bin/env bash
# Runs every fuzz target of the module for a while: scripts/fuzz.sh 10s [PACKAGE-PATTERN]
set -euo pipefail

time=${1:-10s}
pattern=${2:-}
count=0
while IFS=: read -r file target; do
	package=./$(dirname "$file")
	[[ $package == *"$pattern"* ]] || continue
	echo "fuzz: $package $target for $time"
	# Go's minute for making an input smaller would leave targets with large ones no time to try others.
	go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 5x "$package"
	count=$((count + 1))
done < <(git ls-files -co --exclude-standard '*_test.go' | xargs grep -oHE '^func Fuzz[A-Za-z0-9_]+' | sed 's/func //')
echo "fuzz: $count targets"
[ "$count" -gt 0 ]
