"""A GPU's memory, lent to the node daemon through the CUDA driver that is there: libcuda is opened at run time, nothing of CUDA is needed
to install or import this.

Two ways: Gpu.export gives the memory itself as a dma-buf, which NICs read and write; Staging is pinned host memory in a memfd that is
lent instead, with copies from and to the GPU. What a driver or a device does not support is Unsupported, with the reason and what
would help, so that the other way can be taken.

Calls are made in the device's primary context, which is PyTorch's too.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

from headrace.client import Client
from headrace.layout import Described
from headrace.memory import MemfdArea

NOT_SUPPORTED = 801
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600
_DMA_BUF_SUPPORTED, _WRITES_ORDERING = 124, 118  # CU_DEVICE_ATTRIBUTE_...
_ORDERED_BY_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_TO_OWNER = 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
_SEGMENTS_MAX = 1 << 16  # more is no KV cache

_PTR = c_ulonglong
_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetAddressRange_v2": (POINTER(_PTR), POINTER(c_size_t), _PTR),
    "cuPointerSetAttribute": (c_void_p, c_int, _PTR),
    "cuMemGetHandleForAddressRange": (c_void_p, _PTR, c_size_t, c_int, c_ulonglong),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_PTR, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _PTR, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
}


class CudaError(Exception):
    """A call that the driver did not carry out."""

    def __init__(self, what: str, result: int, words: str) -> None:
        super().__init__(f"{what}: {words}")
        self.result = result


class Unsupported(CudaError):
    """There is no driver, or this one or this device cannot do it. The text says what would help."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, NOT_SUPPORTED, why)


class Cuda:
    """The driver."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as e:
            raise Unsupported(
                "open the CUDA driver", f"{e}: is NVIDIA's driver installed, and its library visible here (in a container: --gpus all)?"
            ) from e
        self._call("initialise CUDA", "cuInit", 0)

    def words(self, result: int) -> str:
        name, text = c_char_p(), c_char_p()
        if self._lib.cuGetErrorName(c_int(result), byref(name)) or not name.value:
            return f"CUDA error {result}"
        words = name.value.decode()
        if not self._lib.cuGetErrorString(c_int(result), byref(text)) and text.value:
            words += f" ({text.value.decode()})"
        return words

    def try_(self, what: str, function: str, *args: object) -> int:
        """Calls a function and gives its result."""
        try:
            f = getattr(self._lib, function)
        except AttributeError:
            raise Unsupported(what, f"the driver has no {function}: it is too old, install a newer one") from None
        f.argtypes = _FUNCTIONS[function]
        f.restype = c_int
        return int(f(*args))

    def _call(self, what: str, function: str, *args: object) -> None:
        self.check(what, self.try_(what, function, *args))

    def check(self, what: str, result: int, hint: str = "") -> None:
        """Raises what went wrong."""
        if result == NOT_SUPPORTED:
            raise Unsupported(what, f"{self.words(result)}{hint and ': ' + hint}")
        if result:
            raise CudaError(what, result, self.words(result))

    def gpu(self, ordinal: int = 0) -> Gpu:
        """A device, by its number among those that are visible: torch.cuda.current_device()."""
        return Gpu(self, ordinal)


@dataclass
class DmaBuf:
    """GPU memory as a descriptor that NICs take: it begins at offset of it, and at address in this process."""

    fd: int
    offset: int
    address: int
    size: int

    def close(self) -> None:
        """Who registered the descriptor keeps the memory until that is undone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Copy(NamedTuple):
    """Bytes between the GPU and staging memory."""

    device: int  # address
    offset: int  # in the staging memory
    size: int


class Gpu:
    """A device in its primary context."""

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self._cuda = cuda
        device, context = c_int(), c_void_p()
        self._call_bare(f"find GPU {ordinal}", "cuDeviceGet", byref(device), ordinal)
        self._device = device.value
        self._call_bare(f"take the context of GPU {ordinal}", "cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context: int | None = context.value
        text = ctypes.create_string_buffer(32)
        self._call_bare("ask for the PCI address", "cuDeviceGetPCIBusId", text, len(text), self._device)
        self.bus = text.value.decode().lower()  # as 0000:3b:00.0, for REGISTER_DMABUF
        self._ordered = self.attribute(_WRITES_ORDERING) >= _ORDERED_BY_OWNER

    def close(self) -> None:
        """Lets the context go. Everything made here must be closed before."""
        if self._context is not None:
            self._context = None
            self._call_bare("release the context", "cuDevicePrimaryCtxRelease_v2", self._device)

    def _call_bare(self, what: str, function: str, *args: object) -> None:
        self._cuda.check(what, self._cuda.try_(what, function, *args))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        if self._context is None:
            raise CudaError("use a GPU", 0, "its context was let go")
        self._call_bare("enter the context", "cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call_bare("leave the context", "cuCtxPopCurrent_v2", byref(c_void_p()))

    def call(self, what: str, function: str, *args: object) -> None:
        """Calls a function in the context."""
        with self._current():
            self._call_bare(what, function, *args)

    def attribute(self, number: int) -> int:
        """An attribute of the device; 0 where the driver does not know it."""
        value = c_int()
        return 0 if self._cuda.try_("ask for an attribute", "cuDeviceGetAttribute", byref(value), number, self._device) else value.value

    # --- the memory itself

    def export(self, address: int, size: int) -> DmaBuf:
        """GPU memory as one dma-buf. The range is that of the allocations it lies in, since a driver takes whole pages of these."""
        if not self.attribute(_DMA_BUF_SUPPORTED):
            raise Unsupported(
                "export GPU memory", "this device exports no dma-bufs: install the driver's open kernel modules, or stage over host memory"
            )
        segments = self._segments(address, size)
        one = c_uint(1)  # copies of the engine's are then done before a NIC reads; not every kind of memory has it
        with self._current():
            self._cuda.try_("order copies", "cuPointerSetAttribute", byref(one), _SYNC_MEMOPS, address)
        page = mmap.PAGESIZE
        start = segments[0][0] // page * page
        end = -(-(segments[-1][0] + segments[-1][1]) // page) * page
        fd, what = c_int(-1), f"export {end - start} bytes of GPU memory as a dma-buf"
        with self._current():
            result = self._cuda.try_(what, "cuMemGetHandleForAddressRange", byref(fd), start, end - start, _DMA_BUF_FD, 0)
        if result and len(segments) > 1:
            raise Unsupported(
                what,
                f"{self._cuda.words(result)}: it lies in {len(segments)} segments, which this driver does not give as one: "
                "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or stage over host memory",
            )
        self._cuda.check(what, result, "install the driver's open kernel modules, or stage over host memory")
        os.set_inheritable(fd.value, False)
        return DmaBuf(fd.value, address - start, address, size)

    def _segments(self, address: int, size: int) -> list[tuple[int, int]]:
        """Base and size of the allocations that a range lies in. Memory that was mapped piece by piece has several."""
        if size <= 0:
            raise ValueError(f"export {size} bytes of GPU memory: need at least one")
        found: list[tuple[int, int]] = []
        at = address
        while at < address + size:
            base, n = _PTR(), c_size_t()
            self.call(
                f"look at GPU address {at:#x} (is all of it this GPU's memory?)", "cuMemGetAddressRange_v2", byref(base), byref(n), at
            )
            if not base.value <= at < base.value + n.value or len(found) == _SEGMENTS_MAX:
                raise CudaError(
                    "export GPU memory", 1, f"at {at:#x} lie {n.value} bytes from {base.value:#x} on: it does not go on from there"
                )
            found.append((base.value, n.value))
            at = base.value + n.value
        return found

    def flush(self) -> None:
        """Returns when kernels see what NICs wrote: before what SETTLED says is there is read. Costs nothing where a GPU orders them."""
        if not self._ordered:
            self.call("flush what NICs wrote", "cuFlushGPUDirectRDMAWrites", 0, _TO_OWNER)

    # --- order

    def event(self) -> GpuEvent:
        """A point in a stream."""
        return GpuEvent(self)


class GpuEvent:
    """A point in a stream: done() once all before it is."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, handle = gpu, c_void_p()
        gpu.call("make an event", "cuEventCreate", byref(handle), _NO_TIMING)
        self.handle: int | None = handle.value

    def record(self, stream: int) -> GpuEvent:
        """Puts it behind what is in a stream: torch.cuda.current_stream().cuda_stream."""
        self._gpu.call("record an event", "cuEventRecord", self.handle, stream)
        return self

    def done(self) -> bool:
        """A look, without waiting."""
        with self._gpu._current():
            result = self._gpu._cuda.try_("query an event", "cuEventQuery", self.handle)
        if result != _NOT_READY:
            self._gpu._cuda.check("query an event", result)
        return result == 0

    def wait(self) -> None:
        """Waits until it is done."""
        self._gpu.call("wait for an event", "cuEventSynchronize", self.handle)

    def close(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self._gpu.call("destroy an event", "cuEventDestroy_v2", handle)


class Staging:
    """Pinned host memory to lend in place of a GPU's: what is sent is copied into it before it is pushed, and what arrived is copied out of
    it when the lease has settled. Copies are queued; the events that they give say when they are done."""

    def __init__(self, gpu: Gpu, size: int) -> None:
        self._gpu = gpu
        self.area = MemfdArea(size, name="headrace-staging")
        self._pinned = False
        self._streams: list[int] = []
        try:
            hint = "is locked memory limited (ulimit -l)?"
            gpu.call(f"pin {size} bytes ({hint})", "cuMemHostRegister_v2", self.area.address, self.area.size, _PORTABLE)
            self._pinned = True
            for _ in range(2):  # one each way: they do not wait for each other
                handle = c_void_p()
                gpu.call("make a stream", "cuStreamCreate", byref(handle), _NON_BLOCKING)
                assert handle.value is not None
                self._streams.append(handle.value)
        except CudaError:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """To lend."""
        return self.area.fd

    @property
    def size(self) -> int:
        return self.area.size

    def to_host(self, copies: Sequence[Copy], after: GpuEvent | None = None) -> GpuEvent:
        """Copies from the GPU, behind an event of the stream that computes what is copied."""
        return self._copy(self._streams[0], copies, after, out=True)

    def to_device(self, copies: Sequence[Copy], after: GpuEvent | None = None) -> GpuEvent:
        """Copies to the GPU."""
        return self._copy(self._streams[1], copies, after, out=False)

    def _copy(self, stream: int, copies: Sequence[Copy], after: GpuEvent | None, *, out: bool) -> GpuEvent:
        for c in copies:
            if c.offset < 0 or c.size <= 0 or c.offset + c.size > self.size:
                raise ValueError(f"copy {c.size} bytes at {c.offset} of {self.size} of staging memory")
        if after is not None:
            self._gpu.call("wait in a stream", "cuStreamWaitEvent", stream, after.handle, 0)
        done = self._gpu.event()
        try:
            for c in copies:
                host = self.area.address + c.offset
                if out:
                    self._gpu.call("copy from the GPU", "cuMemcpyDtoHAsync_v2", host, c.device, c.size, stream)
                else:
                    self._gpu.call("copy to the GPU", "cuMemcpyHtoDAsync_v2", c.device, host, c.size, stream)
            return done.record(stream)
        except CudaError:  # some may be under way: they must not go on when the caller believes that nothing does
            self._gpu.call("wait for a stream", "cuStreamSynchronize", stream)
            done.close()
            raise

    def close(self) -> None:
        """Waits for the copies under way. No lease may go from or to the memory any more."""
        while self._streams:
            stream = self._streams.pop()
            self._gpu.call("wait for a stream", "cuStreamSynchronize", stream)
            self._gpu.call("destroy a stream", "cuStreamDestroy_v2", stream)
        if self._pinned:
            self._pinned = False
            self._gpu.call("unpin memory", "cuMemHostUnregister", self.area.address)
        self.area.close()


def lend(client: Client, ordinal: int, described: Described) -> Gpu:
    """Lends a described cache on a GPU as a dma-buf, and gives the device, whose flush() is due before kernels read what arrived.
    Unsupported says why the driver does not export it; that no NIC takes it is the daemon's Refusal, from client.wait_ready()."""
    gpu = Cuda().gpu(ordinal)
    try:
        buf = gpu.export(described.address, described.size)
    except CudaError:
        gpu.close()
        raise
    try:
        client.lend_dmabuf(buf.fd, buf.size, buf.offset, buf.address, described.layout(buf.address), device=gpu.bus)
    finally:
        buf.close()  # the client has its own
    return gpu
