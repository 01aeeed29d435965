//go:build cgo && linux

package cgo

/*
#include <stdlib.h>
#include "cuda.h"
#cgo nocallback hr_cuda_copies
#cgo noescape hr_cuda_copies
*/
import "C"

import "unsafe"

// The twins agree field by field: an array of another length than 0 does not compile, nor does a negative one.
var (
	_ = [unsafe.Sizeof(GPU{}) - C.sizeof_struct_hr_gpu]byte{}
	_ = [unsafe.Offsetof(GPU{}.Memory) - unsafe.Offsetof(C.struct_hr_gpu{}.memory)]byte{}
	_ = [unsafe.Offsetof(GPU{}.dmaBuf) - unsafe.Offsetof(C.struct_hr_gpu{}.dmabuf)]byte{}
	_ = [unsafe.Offsetof(GPU{}.RDMAOrdering) - unsafe.Offsetof(C.struct_hr_gpu{}.gdr_ordering)]byte{}
	_ = [unsafe.Sizeof(Copy{}) - C.sizeof_struct_hr_copy]byte{}
	_ = [unsafe.Offsetof(Copy{}.Len) - unsafe.Offsetof(C.struct_hr_copy{}.len)]byte{}
	_ = [unsafe.Sizeof(IPCHandle{}) - C.sizeof_struct_hr_cuda_ipc]byte{}
	_ = [unsafe.Sizeof(Pointer{}) - C.sizeof_struct_hr_pointer]byte{}
	_ = [unsafe.Offsetof(Pointer{}.legacy) - unsafe.Offsetof(C.struct_hr_pointer{}.legacy)]byte{}

	_ [C.HR_COPY_TO_HOST]byte    = [CopyToHost]byte{}
	_ [-C.HR_CUDA_LACKS]byte     = [-LacksFunction]byte{}
	_ [C.HR_CUDA_IPC_BYTES]byte  = [unsafe.Sizeof(IPCHandle{})]byte{}
	_ [C.HR_CUDA_NAME_BYTES]byte = GPU{}.name
)

func cudaStructSizes() (sizes []uint64) {
	for i := C.uint32_t(0); C.hr_cuda_struct_size(i) != 0; i++ {
		sizes = append(sizes, uint64(C.hr_cuda_struct_size(i)))
	}
	return sizes
}

func cudaOpen(library string) (d *CUDA, state CUDAState, code int, detail string) {
	s := C.CString(library)
	defer C.free(unsafe.Pointer(s))
	var st, r C.int
	var text [C.HR_CUDA_DETAIL_BYTES]C.char
	c := C.hr_cuda_open(s, &st, &r, &text[0])
	detail = C.GoString(&text[0])
	switch st {
	case 0:
		return &CUDA{object(unsafe.Pointer(c))}, CUDAListed, 0, ""
	case 1:
		return nil, CUDANoLibrary, 0, detail
	}
	if r != 0 {
		detail = "cuInit: " + detail
	}
	return nil, CUDAFailed, int(r), detail
}

func driver(d object) *C.struct_hr_cuda { return (*C.struct_hr_cuda)(d) }

func cudaWords(d object, code int) (name, text string) {
	var n, t [C.HR_CUDA_DETAIL_BYTES]C.char
	C.hr_cuda_words(driver(d), C.int(code), &n[0], &t[0])
	return C.GoString(&n[0]), C.GoString(&t[0])
}

func cudaVersion(d object) (int, int) {
	var v C.int
	r := C.hr_cuda_version(driver(d), &v)
	return int(v), int(r)
}

func cudaCount(d object) (int, int) {
	var n C.int
	r := C.hr_cuda_count(driver(d), &n)
	return int(n), int(r)
}

func cudaDevice(d object, ordinal int, g *GPU) int {
	return int(C.hr_cuda_device(driver(d), C.int(ordinal), (*C.struct_hr_gpu)(unsafe.Pointer(g))))
}

func cudaRetain(d object, ordinal int) (object, int) {
	var p unsafe.Pointer
	r := C.hr_cuda_retain(driver(d), C.int(ordinal), &p)
	return object(p), int(r)
}

func cudaRelease(d object, ordinal int) int { return int(C.hr_cuda_release(driver(d), C.int(ordinal))) }

func cudaAlloc(d, x object, bytes uint64) (uint64, int) {
	var p C.uint64_t
	r := C.hr_cuda_alloc(driver(d), unsafe.Pointer(x), C.uint64_t(bytes), &p)
	return uint64(p), int(r)
}

func cudaFree(d, x object, addr uint64) int {
	return int(C.hr_cuda_free(driver(d), unsafe.Pointer(x), C.uint64_t(addr)))
}

func cudaFill(d, x object, addr uint64, b byte, bytes uint64) int {
	return int(C.hr_cuda_fill(driver(d), unsafe.Pointer(x), C.uint64_t(addr), C.uint32_t(b), C.uint64_t(bytes)))
}

func cudaHostAlloc(d, x object, bytes uint64) (unsafe.Pointer, int) {
	var p unsafe.Pointer
	r := C.hr_cuda_host_alloc(driver(d), unsafe.Pointer(x), C.uint64_t(bytes), (*C.uint64_t)(unsafe.Pointer(&p)))
	return p, int(r)
}

func cudaHostFree(d, x object, addr uint64) int {
	return int(C.hr_cuda_host_free(driver(d), unsafe.Pointer(x), C.uint64_t(addr)))
}

func cudaHostRegister(d, x object, addr, bytes uint64) int {
	return int(C.hr_cuda_host_register(driver(d), unsafe.Pointer(x), C.uint64_t(addr), C.uint64_t(bytes)))
}

func cudaHostUnregister(d, x object, addr uint64) int {
	return int(C.hr_cuda_host_unregister(driver(d), unsafe.Pointer(x), C.uint64_t(addr)))
}

func cudaGranularity(d object, ordinal int) (uint64, int) {
	var n C.uint64_t
	r := C.hr_cuda_granularity(driver(d), C.int(ordinal), &n)
	return uint64(n), int(r)
}

func cudaReserve(d, x object, bytes uint64) (uint64, int) {
	var p C.uint64_t
	r := C.hr_cuda_reserve(driver(d), unsafe.Pointer(x), C.uint64_t(bytes), &p)
	return uint64(p), int(r)
}

func cudaMap(d, x object, ordinal int, addr, bytes uint64, rdma bool) int {
	return int(C.hr_cuda_map(driver(d), unsafe.Pointer(x), C.int(ordinal), C.uint64_t(addr), C.uint64_t(bytes), cFlag(rdma)))
}

func cudaUnmap(d, x object, addr, bytes uint64) int {
	return int(C.hr_cuda_unmap(driver(d), unsafe.Pointer(x), C.uint64_t(addr), C.uint64_t(bytes)))
}

func cudaUnreserve(d, x object, addr, bytes uint64) int {
	return int(C.hr_cuda_unreserve(driver(d), unsafe.Pointer(x), C.uint64_t(addr), C.uint64_t(bytes)))
}

func cudaPointer(d, x object, addr uint64, p *Pointer) int {
	return int(C.hr_cuda_pointer(driver(d), unsafe.Pointer(x), C.uint64_t(addr), (*C.struct_hr_pointer)(unsafe.Pointer(p))))
}

func cudaSyncMemops(d, x object, addr uint64) int {
	return int(C.hr_cuda_sync_memops(driver(d), unsafe.Pointer(x), C.uint64_t(addr)))
}

func cudaExport(d, x object, addr, bytes, flags uint64) (int, int) {
	var fd C.int
	r := C.hr_cuda_export(driver(d), unsafe.Pointer(x), C.uint64_t(addr), C.uint64_t(bytes), C.uint64_t(flags), &fd)
	return int(fd), int(r)
}

func cudaFlushRDMA(d, x object) int { return int(C.hr_cuda_flush_rdma(driver(d), unsafe.Pointer(x))) }

func ipc(h *IPCHandle) *C.struct_hr_cuda_ipc { return (*C.struct_hr_cuda_ipc)(unsafe.Pointer(h)) }

func cudaIPCGet(d, x object, addr uint64, h *IPCHandle) int {
	return int(C.hr_cuda_ipc_get(driver(d), unsafe.Pointer(x), C.uint64_t(addr), ipc(h)))
}

func cudaIPCOpen(d, x object, h *IPCHandle) (uint64, int) {
	var p C.uint64_t
	r := C.hr_cuda_ipc_open(driver(d), unsafe.Pointer(x), ipc(h), &p)
	return uint64(p), int(r)
}

func cudaIPCClose(d, x object, addr uint64) int {
	return int(C.hr_cuda_ipc_close(driver(d), unsafe.Pointer(x), C.uint64_t(addr)))
}

func cudaStream(d, x object) (object, int) {
	var p unsafe.Pointer
	r := C.hr_cuda_stream(driver(d), unsafe.Pointer(x), &p)
	return object(p), int(r)
}

func cudaStreamFree(d, x, s object) int {
	return int(C.hr_cuda_stream_free(driver(d), unsafe.Pointer(x), unsafe.Pointer(s)))
}

func cudaStreamSync(d, x, s object) int {
	return int(C.hr_cuda_stream_sync(driver(d), unsafe.Pointer(x), unsafe.Pointer(s)))
}

func cudaStreamWait(d, x, s, e object) int {
	return int(C.hr_cuda_stream_wait(driver(d), unsafe.Pointer(x), unsafe.Pointer(s), unsafe.Pointer(e)))
}

func cudaCopies(d, x, s object, kind CopyKind, c []Copy) (int, int) {
	var done C.uint32_t
	r := C.hr_cuda_copies(driver(d), unsafe.Pointer(x), unsafe.Pointer(s), C.uint32_t(kind), (*C.struct_hr_copy)(unsafe.Pointer(unsafe.SliceData(c))), C.uint32_t(len(c)), &done)
	return int(done), int(r)
}

func cFlag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

func cudaEvent(d, x object, timing, shared bool) (object, int) {
	var p unsafe.Pointer
	r := C.hr_cuda_event(driver(d), unsafe.Pointer(x), cFlag(timing), cFlag(shared), &p)
	return object(p), int(r)
}

func cudaEventFree(d, x, e object) int {
	return int(C.hr_cuda_event_free(driver(d), unsafe.Pointer(x), unsafe.Pointer(e)))
}

func cudaEventRecord(d, x, e, s object) int {
	return int(C.hr_cuda_event_record(driver(d), unsafe.Pointer(x), unsafe.Pointer(e), unsafe.Pointer(s)))
}

func cudaEventQuery(d, x, e object) int {
	return int(C.hr_cuda_event_query(driver(d), unsafe.Pointer(x), unsafe.Pointer(e)))
}

func cudaEventSync(d, x, e object) int {
	return int(C.hr_cuda_event_sync(driver(d), unsafe.Pointer(x), unsafe.Pointer(e)))
}

func cudaEventElapsed(d, x, from, to object) (float32, int) {
	var ms C.float
	r := C.hr_cuda_event_elapsed(driver(d), unsafe.Pointer(x), unsafe.Pointer(from), unsafe.Pointer(to), &ms)
	return float32(ms), int(r)
}

func cudaEventIPCGet(d, x, e object, h *IPCHandle) int {
	return int(C.hr_cuda_event_ipc_get(driver(d), unsafe.Pointer(x), unsafe.Pointer(e), ipc(h)))
}

func cudaEventIPCOpen(d, x object, h *IPCHandle) (object, int) {
	var p unsafe.Pointer
	r := C.hr_cuda_event_ipc_open(driver(d), unsafe.Pointer(x), ipc(h), &p)
	return object(p), int(r)
}
