//go:build !cgo || !linux

package cgo

import "syscall"

// Enabled tells whether this build has cgo.
const Enabled = false

// Probe looks for RDMA devices.
func Probe() Verbs { return Verbs{State: NotBuilt} }

type errno = syscall.Errno

// Without cgo there is nothing to open, so nothing else is ever called on what was opened.
const none = syscall.ENOSYS

func structSizes() []uint64                                        { return nil }
func cHandles() (h Handles)                                        { return h }
func cOpen(string) (object, errno)                                 { return nil, none }
func cClose(object) errno                                          { return none }
func cQueryDevice(object, *DeviceAttr) errno                       { return none }
func cQueryPort(object, int, *PortAttr) errno                      { return none }
func cQueryGID(object, int, int, *GID) errno                       { return none }
func cQueryPKey(object, int, int) (uint16, errno)                  { return 0, none }
func cAsyncFD(object) int                                          { return -1 }
func cAsyncEvent(object, *AsyncEvent) errno                        { return none }
func cAllocPD(object) (object, errno)                              { return nil, none }
func cDeallocPD(object) errno                                      { return none }
func cRegMR(object, uint64, uint64, Access, *Keys) (object, errno) { return nil, none }
func cRegDMABuf(object, uint64, uint64, uint64, int, Access, *Keys) (object, errno) {
	return nil, none
}
func cDeregMR(object) errno                         { return none }
func cAllocMW(object) (object, uint32, errno)       { return nil, 0, none }
func cDeallocMW(object) errno                       { return none }
func cCreateChannel(object) (object, int, errno)    { return nil, -1, none }
func cDestroyChannel(object) errno                  { return none }
func cChannelEvent(object) errno                    { return none }
func cCreateCQ(object, int, object) (object, errno) { return nil, none }
func cDestroyCQ(object) errno                       { return none }
func cCreateQP(object, object, object, *QPCaps) (object, uint32, errno) {
	return nil, 0, none
}
func cModifyQP(object, *QPAttr) errno                                                { return none }
func cQueryQP(object) (QPState, errno)                                               { return 0, none }
func cDestroyQP(object) errno                                                        { return none }
func cPostSend(object, []WR) (int, errno)                                            { return 0, none }
func cPostRecv(object, []Recv) (int, errno)                                          { return 0, none }
func cPostBind(object, object, object, uint32, uint64, uint64, Access, uint64) errno { return none }
func cPoll(object, []WC) int                                                         { return -int(none) }
func cEntries() (e Entries)                                                          { return e }
func cArm(object) errno                                                              { return none }
func cNullCreate(int) (object, object, errno)                                        { return nil, nil, none }
func cNullDestroy(object)                                                            {}
func cNullLoop(object, []WR, int, bool) uint64                                       { return 0 }
