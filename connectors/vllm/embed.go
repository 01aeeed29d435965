// Package vllm carries vLLM's connector, a Python package, in Go programs, so that one file is enough to install. It must
// not know what the package does.
package vllm

import "embed"

// Files are the package's, and what a wheel of it says. Bytecode that Python left in a working tree is among them where
// there is some; whoever reads them leaves it out.
//
//go:embed all:headrace pyproject.toml README.md
var Files embed.FS
