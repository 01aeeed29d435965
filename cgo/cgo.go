// Package cgo is the only package with an `import "C"`: a shim over libibverbs, which is opened at run time, so that
// one binary runs where the library is there and where it is not. Without cgo, or without the library's headers at
// build time, the package still builds and says what it lacks.
package cgo

import "errors"

// ErrNotSupported is the answer of a build or host without RDMA verbs.
var ErrNotSupported = errors.New("RDMA verbs are not supported here")

// State is how far verbs can be used.
type State int

// The states, from what this build lacks to what the host has. Only Listed is conclusive about devices.
const (
	NotBuilt  State = iota // built without cgo
	NoHeaders              // built without libibverbs' headers
	NoLibrary              // libibverbs.so.1 cannot be opened on this host
	Failed                 // the library is there and could not list devices
	Listed                 // Devices holds what there is, possibly nothing
)

// Verbs is what a probe found.
type Verbs struct {
	State   State
	Devices []string // names, as mlx5_0 or rxe0
	Detail  string   // what the dynamic linker or the library said
}

// Err is nil when there is a device to use, else ErrNotSupported or why it is not known, with the reason.
func (v Verbs) Err() error {
	switch {
	case v.State == Failed:
		return errors.New("list RDMA devices: " + v.Detail)
	case v.State == Listed && len(v.Devices) > 0:
		return nil
	default:
		return &unsupported{v.Reason()}
	}
}

// Reason says in a few words what there is or what is missing.
func (v Verbs) Reason() string {
	switch v.State {
	case NotBuilt:
		return "built without cgo"
	case NoHeaders:
		return "built without libibverbs' headers"
	case NoLibrary:
		return "libibverbs.so.1 cannot be opened: " + v.Detail
	case Failed:
		return v.Detail
	default:
		if len(v.Devices) == 0 {
			return "no RDMA device"
		}
		return ""
	}
}

// Remedy says what to do about it, "" when nothing is to be done.
func (v Verbs) Remedy() string {
	switch v.State {
	case NotBuilt:
		return "install a C compiler (apt-get install gcc libc6-dev) and build with CGO_ENABLED=1"
	case NoHeaders:
		return "install libibverbs' headers (apt-get install libibverbs-dev) and build again"
	case NoLibrary:
		return "install the library (apt-get install libibverbs1 ibverbs-providers)"
	case Failed:
		return "check that /dev/infiniband is readable and the rdma modules are loaded"
	default:
		if len(v.Devices) == 0 {
			return "fit an RDMA NIC, or load soft RoCE (modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0)"
		}
		return ""
	}
}

type unsupported struct{ reason string }

func (u *unsupported) Error() string { return ErrNotSupported.Error() + ": " + u.reason }
func (u *unsupported) Unwrap() error { return ErrNotSupported }
