//go:build cgo && linux

package cgo

/*
#cgo LDFLAGS: -ldl
#include "verbs.h"
*/
import "C"

import "unsafe"

// Enabled tells whether this build has cgo.
const Enabled = true

// Probe looks for RDMA devices. It asks the host anew each time: devices come and go.
func Probe() Verbs {
	var p C.struct_hr_probe
	// The two sides were compiled from one header, but by two compilers.
	if unsafe.Sizeof(p) != uintptr(C.hr_probe_size()) {
		panic("cgo: struct hr_probe has another size in Go than in C")
	}
	C.hr_probe_verbs(&p)
	v := Verbs{Detail: C.GoString(&p.detail[0])}
	switch p.state {
	case C.HR_NO_HEADERS:
		v.State = NoHeaders
	case C.HR_NO_LIBRARY:
		v.State = NoLibrary
	case C.HR_LISTED:
		v.State = Listed
	default:
		v.State = Failed
	}
	for i := range int(p.devices) {
		v.Devices = append(v.Devices, C.GoString(&p.names[i][0]))
	}
	return v
}
