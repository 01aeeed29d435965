// Package enginebench measures the reference engine: how fast it reads prompts and generates, at which context and
// batch size, how long a worker process takes to be ready, and what it keeps in memory. Rates come from the model's
// forward pass and greedy sampling alone, without a server or a scheduler; scripts/bench-engine.sh puts llama.cpp beside
// them on the same file.
package enginebench
