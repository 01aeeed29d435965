"""headrace.cuda against a stand-in for the CUDA driver that is strict where the real one is (cgo/cudatest)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_ubyte, c_ulonglong
from pathlib import Path

import pytest

from headrace import cuda, protocol
from headrace.client import Client, Refusal
from headrace.cuda import Copy, Cuda, CudaError, Gpu, Staging, Unsupported, lend
from headrace.layout import CacheView, describe
from headrace.protocol import Code
from tests.nodes import Node

SOURCE = Path(__file__).parents[3] / "cgo" / "cudatest" / "standin" / "libcuda.c"
MIB = 1 << 20
REGISTER = protocol.register_dmabuf
Build = Callable[..., str]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if cc is None or not SOURCE.exists():
        pytest.skip("no C compiler to build the stand-in for the CUDA driver with")
    made: dict[tuple[str, ...], str] = {}

    def make(*defines: str) -> str:
        if defines not in made:
            so = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
            flags = ["-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", *(f"-D{d}" for d in defines)]
            subprocess.run([cc, *flags, "-o", str(so), str(SOURCE)], check=True)
            made[defines] = str(so)
        return made[defines]

    return make


class Device:
    """A GPU of the stand-in, with memory."""

    def __init__(self, library: str, log: Path) -> None:
        self.log = log
        self.gpu: Gpu = Cuda(library).gpu(0)
        self._taken: list[int] = []
        self.failed = ""  # a function that was made to fail

    def alloc(self, size: int) -> int:
        at = c_ulonglong()
        self.gpu.call("allocate", "cuMemAlloc_v2", byref(at), size)
        self._taken.append(at.value)
        return at.value

    def calls(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()]

    def close(self) -> None:
        for at in self._taken:
            self.gpu.call("free", "cuMemFree_v2", at)
        self.gpu.close()


@pytest.fixture
def device(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setitem(cuda._FUNCTIONS, "cuMemAlloc_v2", (ctypes.POINTER(c_ulonglong), c_size_t))
    monkeypatch.setitem(cuda._FUNCTIONS, "cuMemFree_v2", (c_ulonglong,))
    monkeypatch.setenv("CUDA_STANDIN_LOG", str(tmp_path / "calls"))
    before = len(os.listdir("/proc/self/fd"))
    made = Device(build(), tmp_path / "calls")
    yield made
    monkeypatch.delenv("CUDA_STANDIN_FAULTS", raising=False)
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors are left over"
    calls = made.calls()
    assert calls.count("cuCtxPushCurrent_v2") == calls.count("cuCtxPopCurrent_v2"), "a context was left on this thread"
    for take, give in (("cuEventCreate", "cuEventDestroy_v2"), ("cuStreamCreate", "cuStreamDestroy_v2")):
        assert calls.count(take) - (take == made.failed) == calls.count(give), f"{take} without {give}"


def memory(address: int, size: int) -> ctypes.Array[c_ubyte]:
    """The stand-in's device memory is this process's."""
    return (c_ubyte * size).from_address(address)


def test_no_driver() -> None:
    with pytest.raises(Unsupported, match="is NVIDIA's driver installed"):
        Cuda("libcuda-that-is-not-there.so.1")


def test_no_such_gpu(build: Build) -> None:
    with pytest.raises(CudaError, match="find GPU 5: CUDA error 101"):
        Cuda(build()).gpu(5)


def test_export(device: Device) -> None:
    assert device.gpu.bus == "0000:3b:00.0"
    at = device.alloc(3 * MIB)
    buf = device.gpu.export(at + 8192 + 5, MIB)
    assert (buf.offset, buf.address, buf.size) == (8192 + 5, at + 8192 + 5, MIB)
    memory(at, 3 * MIB)[8192 + 5] = 0x5A
    assert os.pread(buf.fd, 1, buf.offset) == b"\x5a"
    assert not os.get_inheritable(buf.fd)
    assert os.fstat(buf.fd).st_size >= buf.offset + buf.size
    buf.close()
    buf.close()
    assert "cuPointerSetAttribute" in device.calls()


def test_export_of_what_is_not_the_gpus(device: Device) -> None:
    at = device.alloc(MIB)
    with pytest.raises(CudaError, match="is all of it this GPU's memory"):
        device.gpu.export(at + MIB - 4096, 64 * MIB)
    with pytest.raises(ValueError, match="at least one"):
        device.gpu.export(at, 0)


def test_export_unsupported_by_the_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    at = device.alloc(MIB)
    monkeypatch.setenv("CUDA_STANDIN_NO_DMABUF", "1")
    with pytest.raises(Unsupported, match="open kernel modules, or stage"):
        device.gpu.export(at, MIB)


def test_export_refused_by_the_driver(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    at = device.alloc(MIB)
    monkeypatch.setenv("CUDA_STANDIN_FAULTS", "cuMemGetHandleForAddressRange=801")
    with pytest.raises(Unsupported, match="operation not supported"):
        device.gpu.export(at, MIB)
    monkeypatch.setenv("CUDA_STANDIN_FAULTS", "cuMemGetHandleForAddressRange=1")
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE") as e:
        device.gpu.export(at, MIB)
    assert not isinstance(e.value, Unsupported)
    monkeypatch.setenv("CUDA_STANDIN_FAULTS", "cuPointerSetAttribute=801")
    device.gpu.export(at, MIB).close()  # not every kind of memory has it


def test_an_old_driver(build: Build) -> None:
    gpu = Cuda(build("LACKS_EXPORT")).gpu()
    gpu.attribute(75)
    with pytest.raises(Unsupported, match="has no cuMemGetHandleForAddressRange"):
        export_anything(gpu)
    gpu.close()
    with pytest.raises(Unsupported, match="has no cuDevicePrimaryCtxRetain: it is too old"):
        Cuda(build("LACKS_RETAIN")).gpu()


def export_anything(gpu: Gpu) -> None:
    cuda._FUNCTIONS.setdefault("cuMemAlloc_v2", (ctypes.POINTER(c_ulonglong), c_size_t))
    at = c_ulonglong()
    gpu.call("allocate", "cuMemAlloc_v2", byref(at), MIB)
    gpu.export(at.value, MIB)


def test_flush_only_where_it_is_needed(device: Device, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    device.gpu.flush()
    assert "cuFlushGPUDirectRDMAWrites" not in device.calls()
    monkeypatch.setattr(cuda, "_ORDERED_BY_OWNER", 200)
    other = Cuda(build()).gpu()
    other.flush()
    other.close()
    assert "cuFlushGPUDirectRDMAWrites" in device.calls()


def test_lend(device: Device, build: Build, nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to the daemon; this one has no NIC that would take it, and the stand-in's descriptor is no dma-buf."""
    at = device.alloc(4 * MIB) + 4096 + 512
    described = describe(
        [CacheView("l", at, (8, 3, 16, 256), (16 * 3 * 512, 512, 3 * 512, 2), "bfloat16", 2)], blocks=8, block_tokens=16, heads_total=3
    )
    client, sent = Client(nodes[0].socket, "p"), []
    monkeypatch.setattr(cuda, "Cuda", lambda: Cuda(build()))
    monkeypatch.setattr("headrace.protocol.register_dmabuf", lambda *a: sent.append(a) or REGISTER(*a))  # type: ignore[func-returns-value]
    gpu = lend(client, 0, described)
    assert sent == [(8 * 16 * 3 * 512, 4096 + 512, at, described.layout(at), "0000:3b:00.0", 0)]
    with pytest.raises(Refusal, match="lend memory") as refusal:
        client.wait_ready()
    assert refusal.value.code is Code.REGION
    client.close()
    gpu.close()
    monkeypatch.setenv("CUDA_STANDIN_NO_DMABUF", "1")
    with pytest.raises(Unsupported):
        lend(client, 0, described)


def test_staging_both_ways(device: Device) -> None:
    at = device.alloc(MIB)
    memory(at, MIB)[:16] = list(range(16))
    staging = Staging(device.gpu, 64 << 10)
    stream = staging._streams[0]
    computed = device.gpu.event().record(stream)
    out = staging.to_host([Copy(at, 4096, 8), Copy(at + 8, 100, 8)], computed)
    out.wait()
    assert out.done()
    assert os.pread(staging.fd, 8, 4096) == bytes(range(8))  # as the daemon sees it
    assert os.pread(staging.fd, 8, 100) == bytes(range(8, 16))
    back = staging.to_device([Copy(at + 4096, 100, 8)])
    back.wait()
    assert bytes(memory(at + 4096, 8)) == bytes(range(8, 16))
    for e in (computed, out, back):
        e.close()
    with pytest.raises(ValueError, match="of staging memory"):
        staging.to_host([Copy(at, staging.size - 4, 8)])
    staging.close()
    staging.close()
    calls = device.calls()
    assert calls.count("cuMemHostRegister_v2") == calls.count("cuMemHostUnregister") == 1


def test_an_event_that_is_not_yet(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    event = device.gpu.event()
    monkeypatch.setenv("CUDA_STANDIN_FAULTS", "cuEventQuery=600")
    assert not event.done()
    monkeypatch.setenv("CUDA_STANDIN_FAULTS", "cuEventQuery=700")
    with pytest.raises(CudaError, match="error 700"):
        event.done()
    monkeypatch.delenv("CUDA_STANDIN_FAULTS")
    event.close()


@pytest.mark.parametrize("function", ["cuMemHostRegister_v2", "cuStreamCreate"])
def test_staging_that_cannot_be_had_leaves_nothing(device: Device, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    device.failed = function
    monkeypatch.setenv("CUDA_STANDIN_FAULTS", f"{function}=2")
    with pytest.raises(CudaError):
        Staging(device.gpu, 4096)
    monkeypatch.delenv("CUDA_STANDIN_FAULTS")
    assert len(os.listdir("/proc/self/fd")) == before
    calls = device.calls()
    pinned = function != "cuMemHostRegister_v2"
    assert calls.count("cuMemHostUnregister") == pinned


def test_a_failed_copy_waits_for_those_under_way(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    at, staging = device.alloc(MIB), Staging(device.gpu, 4096)
    monkeypatch.setenv("CUDA_STANDIN_FAULTS", "cuMemcpyDtoHAsync_v2=700")
    with pytest.raises(CudaError, match="copy from the GPU"):
        staging.to_host([Copy(at, 0, 8)])
    monkeypatch.delenv("CUDA_STANDIN_FAULTS")
    assert device.calls().count("cuStreamSynchronize") == 1
    staging.close()


def test_a_context_that_was_let_go(build: Build) -> None:
    gpu = Cuda(build()).gpu()
    gpu.close()
    gpu.close()
    with pytest.raises(CudaError, match="let go"):
        gpu.event()
