//go:build !cgo || !linux

package cgo

import "unsafe"

// Without cgo no driver is opened, so nothing below cudaOpen is ever called.

func cudaStructSizes() []uint64 { return nil }

func cudaOpen(string) (*CUDA, CUDAState, int, string) { return nil, CUDANotBuilt, 0, "" }

func cudaWords(object, int) (string, string)                         { return "", "" }
func cudaVersion(object) (int, int)                                  { return 0, LacksFunction }
func cudaCount(object) (int, int)                                    { return 0, LacksFunction }
func cudaDevice(object, int, *GPU) int                               { return LacksFunction }
func cudaRetain(object, int) (object, int)                           { return nil, LacksFunction }
func cudaRelease(object, int) int                                    { return LacksFunction }
func cudaAlloc(object, object, uint64) (uint64, int)                 { return 0, LacksFunction }
func cudaFree(object, object, uint64) int                            { return LacksFunction }
func cudaFill(object, object, uint64, byte, uint64) int              { return LacksFunction }
func cudaHostAlloc(object, object, uint64) (unsafe.Pointer, int)     { return nil, LacksFunction }
func cudaHostFree(object, object, uint64) int                        { return LacksFunction }
func cudaHostRegister(object, object, uint64, uint64) int            { return LacksFunction }
func cudaHostUnregister(object, object, uint64) int                  { return LacksFunction }
func cudaGranularity(object, int) (uint64, int)                      { return 0, LacksFunction }
func cudaReserve(object, object, uint64) (uint64, int)               { return 0, LacksFunction }
func cudaMap(object, object, int, uint64, uint64, bool) int          { return LacksFunction }
func cudaUnmap(object, object, uint64, uint64) int                   { return LacksFunction }
func cudaUnreserve(object, object, uint64, uint64) int               { return LacksFunction }
func cudaPointer(object, object, uint64, *Pointer) int               { return LacksFunction }
func cudaSyncMemops(object, object, uint64) int                      { return LacksFunction }
func cudaExport(object, object, uint64, uint64, uint64) (int, int)   { return -1, LacksFunction }
func cudaFlushRDMA(object, object) int                               { return LacksFunction }
func cudaIPCGet(object, object, uint64, *IPCHandle) int              { return LacksFunction }
func cudaIPCOpen(object, object, *IPCHandle) (uint64, int)           { return 0, LacksFunction }
func cudaIPCClose(object, object, uint64) int                        { return LacksFunction }
func cudaStream(object, object) (object, int)                        { return nil, LacksFunction }
func cudaStreamFree(object, object, object) int                      { return LacksFunction }
func cudaStreamSync(object, object, object) int                      { return LacksFunction }
func cudaStreamWait(object, object, object, object) int              { return LacksFunction }
func cudaCopies(object, object, object, CopyKind, []Copy) (int, int) { return 0, LacksFunction }
func cudaEvent(object, object, bool, bool) (object, int)             { return nil, LacksFunction }
func cudaEventFree(object, object, object) int                       { return LacksFunction }
func cudaEventRecord(object, object, object, object) int             { return LacksFunction }
func cudaEventQuery(object, object, object) int                      { return LacksFunction }
func cudaEventSync(object, object, object) int                       { return LacksFunction }
func cudaEventElapsed(object, object, object, object) (float32, int) { return 0, LacksFunction }
func cudaEventIPCGet(object, object, object, *IPCHandle) int         { return LacksFunction }
func cudaEventIPCOpen(object, object, *IPCHandle) (object, int)      { return nil, LacksFunction }
