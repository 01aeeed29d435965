package telemetry

// The objects are committed, and the same wherever the same major version of clang builds them: see gen.
//go:generate go run ./gen sockets bpfel
//go:generate go run ./gen packets bpfel
//go:generate go run ./gen posts amd64,arm64
