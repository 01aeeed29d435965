//go:build cgo && linux

package cgo

/*
#cgo LDFLAGS: -ldl -lpthread
#cgo noescape hr_post_send
#cgo nocallback hr_post_send
#cgo noescape hr_post_recv
#cgo nocallback hr_post_recv
#cgo noescape hr_poll
#cgo nocallback hr_poll
#cgo nocallback hr_arm
#include <stdlib.h>
#include "verbs.h"
*/
import "C"

import (
	"syscall"
	"unsafe"
)

// Enabled tells whether this build has cgo.
const Enabled = true

// The twins agree field by field: an array of another length than 0 does not compile, nor does a negative one.
var (
	_ = [unsafe.Sizeof(WR{}) - C.sizeof_struct_hr_wr]byte{}
	_ = [unsafe.Offsetof(WR{}.Len) - unsafe.Offsetof(C.struct_hr_wr{}.len)]byte{}
	_ = [unsafe.Offsetof(WR{}.Imm) - unsafe.Offsetof(C.struct_hr_wr{}.imm)]byte{}
	_ = [unsafe.Offsetof(WR{}.Flags) - unsafe.Offsetof(C.struct_hr_wr{}.flags)]byte{}
	_ = [unsafe.Sizeof(Recv{}) - C.sizeof_struct_hr_recv]byte{}
	_ = [unsafe.Offsetof(Recv{}.LKey) - unsafe.Offsetof(C.struct_hr_recv{}.lkey)]byte{}
	_ = [unsafe.Sizeof(WC{}) - C.sizeof_struct_hr_wc]byte{}
	_ = [unsafe.Offsetof(WC{}.Imm) - unsafe.Offsetof(C.struct_hr_wc{}.imm)]byte{}
	_ = [unsafe.Offsetof(WC{}.Vendor) - unsafe.Offsetof(C.struct_hr_wc{}.vendor)]byte{}
	_ = [unsafe.Sizeof(DeviceAttr{}) - C.sizeof_struct_hr_device_attr]byte{}
	_ = [unsafe.Offsetof(DeviceAttr{}.MaxMW) - unsafe.Offsetof(C.struct_hr_device_attr{}.max_mw)]byte{}
	_ = [unsafe.Offsetof(DeviceAttr{}.VendorPart) - unsafe.Offsetof(C.struct_hr_device_attr{}.vendor_part)]byte{}
	_ = [unsafe.Sizeof(PortAttr{}) - C.sizeof_struct_hr_port_attr]byte{}
	_ = [unsafe.Offsetof(PortAttr{}.LinkLayer) - unsafe.Offsetof(C.struct_hr_port_attr{}.link_layer)]byte{}
	_ = [unsafe.Offsetof(PortAttr{}.MaxMessage) - unsafe.Offsetof(C.struct_hr_port_attr{}.max_msg)]byte{}
	_ = [unsafe.Sizeof(GID{}) - C.sizeof_struct_hr_gid]byte{}
	_ = [unsafe.Offsetof(GID{}.IfIndex) - unsafe.Offsetof(C.struct_hr_gid{}.ifindex)]byte{}
	_ = [unsafe.Sizeof(QPCaps{}) - C.sizeof_struct_hr_qp_caps]byte{}
	_ = [unsafe.Offsetof(QPCaps{}.InlineBytes) - unsafe.Offsetof(C.struct_hr_qp_caps{}.inline_bytes)]byte{}
	_ = [unsafe.Sizeof(QPAttr{}) - C.sizeof_struct_hr_qp_attr]byte{}
	_ = [unsafe.Offsetof(QPAttr{}.DestQPN) - unsafe.Offsetof(C.struct_hr_qp_attr{}.dest_qpn)]byte{}
	_ = [unsafe.Offsetof(QPAttr{}.RNRRetry) - unsafe.Offsetof(C.struct_hr_qp_attr{}.rnr_retry)]byte{}
	_ = [unsafe.Offsetof(QPAttr{}.TrafficClass) - unsafe.Offsetof(C.struct_hr_qp_attr{}.traffic_class)]byte{}
	_ = [unsafe.Offsetof(QPAttr{}.DGID) - unsafe.Offsetof(C.struct_hr_qp_attr{}.dgid)]byte{}
	_ = [unsafe.Sizeof(Keys{}) - C.sizeof_struct_hr_keys]byte{}
	_ = [unsafe.Sizeof(AsyncEvent{}) - C.sizeof_struct_hr_async]byte{}
	_ = [unsafe.Sizeof(Handles{}) - C.sizeof_struct_hr_handles]byte{}
	_ = [unsafe.Offsetof(Handles{}.Windows) - unsafe.Offsetof(C.struct_hr_handles{}.mws)]byte{}

	_ [C.HR_OP_LOCAL_INV]byte  = [LocalInv]byte{}
	_ [C.HR_OP_READ]byte       = [Read]byte{}
	_ [C.HR_SOLICITED]byte     = [Solicited]byte{}
	_ [C.HR_WC_RECV_WRITE]byte = [WCRecvWrite]byte{}
	_ [C.HR_WC_LOCAL_INV]byte  = [WCLocalInv]byte{}
)

// One header, but two compilers: the sizes that C really uses.
func structSizes() (sizes []uint64) {
	for i := C.uint32_t(0); C.hr_struct_size(i) != 0; i++ {
		sizes = append(sizes, uint64(C.hr_struct_size(i)))
	}
	return sizes
}

// Probe looks for RDMA devices. It asks the host anew each time: devices come and go.
func Probe() Verbs {
	var p C.struct_hr_probe
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

type errno = syscall.Errno

func cHandles() (h Handles) {
	C.hr_handles((*C.struct_hr_handles)(unsafe.Pointer(&h)))
	return h
}

func cOpen(name string) (object, errno) {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	var p unsafe.Pointer
	e := C.hr_open(s, &p)
	return object(p), errno(e)
}

func cClose(c object) errno { return errno(C.hr_close(unsafe.Pointer(c))) }

func cQueryDevice(c object, a *DeviceAttr) errno {
	return errno(C.hr_query_device(unsafe.Pointer(c), (*C.struct_hr_device_attr)(unsafe.Pointer(a))))
}

func cQueryPort(c object, port int, a *PortAttr) errno {
	return errno(C.hr_query_port(unsafe.Pointer(c), C.uint32_t(port), (*C.struct_hr_port_attr)(unsafe.Pointer(a))))
}

func cQueryGID(c object, port, index int, g *GID) errno {
	return errno(C.hr_query_gid(unsafe.Pointer(c), C.uint32_t(port), C.uint32_t(index), (*C.struct_hr_gid)(unsafe.Pointer(g))))
}

func cQueryPKey(c object, port, index int) (uint16, errno) {
	var k C.uint32_t
	e := C.hr_query_pkey(unsafe.Pointer(c), C.uint32_t(port), C.uint32_t(index), &k)
	return uint16(k), errno(e)
}

func cAsyncFD(c object) int { return int(C.hr_async_fd(unsafe.Pointer(c))) }

func cAsyncEvent(c object, e *AsyncEvent) errno {
	return errno(C.hr_async_event(unsafe.Pointer(c), (*C.struct_hr_async)(unsafe.Pointer(e))))
}

func cAllocPD(dev object) (object, errno) {
	var p unsafe.Pointer
	e := C.hr_alloc_pd(unsafe.Pointer(dev), &p)
	return object(p), errno(e)
}

func cDeallocPD(c object) errno { return errno(C.hr_dealloc_pd(unsafe.Pointer(c))) }

func cRegMR(pd object, addr, length uint64, access Access, k *Keys) (object, errno) {
	var p unsafe.Pointer
	e := C.hr_reg_mr(unsafe.Pointer(pd), C.uint64_t(addr), C.uint64_t(length), C.uint32_t(access), &p, (*C.struct_hr_keys)(unsafe.Pointer(k)))
	return object(p), errno(e)
}

func cRegDMABuf(pd object, offset, length, iova uint64, fd int, access Access, k *Keys) (object, errno) {
	var p unsafe.Pointer
	e := C.hr_reg_dmabuf_mr(unsafe.Pointer(pd), C.uint64_t(offset), C.uint64_t(length), C.uint64_t(iova), C.int(fd), C.uint32_t(access), &p, (*C.struct_hr_keys)(unsafe.Pointer(k)))
	return object(p), errno(e)
}

func cDeregMR(c object) errno { return errno(C.hr_dereg_mr(unsafe.Pointer(c))) }

func cAllocMW(pd object) (object, uint32, errno) {
	var p unsafe.Pointer
	var k C.uint32_t
	e := C.hr_alloc_mw(unsafe.Pointer(pd), &p, &k)
	return object(p), uint32(k), errno(e)
}

func cDeallocMW(c object) errno { return errno(C.hr_dealloc_mw(unsafe.Pointer(c))) }

func cCreateChannel(dev object) (object, int, errno) {
	var p unsafe.Pointer
	var fd C.int
	e := C.hr_create_channel(unsafe.Pointer(dev), &p, &fd)
	return object(p), int(fd), errno(e)
}

func cDestroyChannel(c object) errno { return errno(C.hr_destroy_channel(unsafe.Pointer(c))) }
func cChannelEvent(c object) errno   { return errno(C.hr_channel_event(unsafe.Pointer(c))) }

func cCreateCQ(dev object, entries int, channel object) (object, errno) {
	var p unsafe.Pointer
	e := C.hr_create_cq(unsafe.Pointer(dev), C.uint32_t(entries), unsafe.Pointer(channel), 0, &p)
	return object(p), errno(e)
}

func cDestroyCQ(c object) errno { return errno(C.hr_destroy_cq(unsafe.Pointer(c))) }

func cCreateQP(pd, send, recv object, caps *QPCaps) (object, uint32, errno) {
	var q *C.struct_hr_qp
	var n C.uint32_t
	e := C.hr_create_qp(unsafe.Pointer(pd), unsafe.Pointer(send), unsafe.Pointer(recv), (*C.struct_hr_qp_caps)(unsafe.Pointer(caps)), &q, &n)
	return object(unsafe.Pointer(q)), uint32(n), errno(e)
}

func cModifyQP(c object, a *QPAttr) errno {
	return errno(C.hr_modify_qp((*C.struct_hr_qp)(c), (*C.struct_hr_qp_attr)(unsafe.Pointer(a))))
}

func cQueryQP(c object) (QPState, errno) {
	var s C.uint32_t
	e := C.hr_query_qp((*C.struct_hr_qp)(c), &s)
	return QPState(s), errno(e)
}

func cDestroyQP(c object) errno { return errno(C.hr_destroy_qp((*C.struct_hr_qp)(c))) }

func cPostSend(c object, wrs []WR) (int, errno) {
	r := C.hr_post_send((*C.struct_hr_qp)(c), (*C.struct_hr_wr)(unsafe.Pointer(unsafe.SliceData(wrs))), C.uint32_t(len(wrs)))
	return int(uint32(r)), errno(r >> 32)
}

func cPostRecv(c object, wrs []Recv) (int, errno) {
	r := C.hr_post_recv((*C.struct_hr_qp)(c), (*C.struct_hr_recv)(unsafe.Pointer(unsafe.SliceData(wrs))), C.uint32_t(len(wrs)))
	return int(uint32(r)), errno(r >> 32)
}

func cPostBind(c, mw, mr object, key uint32, addr, length uint64, access Access, id uint64) errno {
	r := C.hr_post_bind((*C.struct_hr_qp)(c), unsafe.Pointer(mw), unsafe.Pointer(mr), C.uint32_t(key), C.uint64_t(addr), C.uint64_t(length), C.uint32_t(access), C.uint64_t(id))
	return errno(r >> 32)
}

func cPoll(c object, out []WC) int {
	return int(C.hr_poll(unsafe.Pointer(c), (*C.struct_hr_wc)(unsafe.Pointer(unsafe.SliceData(out))), C.uint32_t(len(out))))
}

func cEntries() Entries {
	return Entries{Post: uintptr(C.hr_post_sampled), Poll: uintptr(C.hr_poll_sampled)}
}

func cArm(c object) errno { return errno(C.hr_arm(unsafe.Pointer(c))) }

func cNullCreate(depth int) (qp, cq object, e errno) {
	var q *C.struct_hr_qp
	var p unsafe.Pointer
	e = errno(C.hr_null_create(C.uint32_t(depth), &q, &p))
	return object(unsafe.Pointer(q)), object(p), e
}

func cNullDestroy(c object) { C.hr_null_destroy((*C.struct_hr_qp)(c)) }

func cNullLoop(c object, wrs []WR, rounds int, chained bool) uint64 {
	var flag C.uint32_t
	if chained {
		flag = 1
	}
	return uint64(C.hr_null_loop((*C.struct_hr_qp)(c), (*C.struct_hr_wr)(unsafe.Pointer(unsafe.SliceData(wrs))), C.uint32_t(len(wrs)), C.uint32_t(rounds), flag))
}
