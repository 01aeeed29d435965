"""KV cache of a CPU engine in memfds, so that a node daemon can map it. vLLM allocates it inside get_mem_pool_context(): there a MemfdPool
takes the place of the allocator for large tensors, without a change to vLLM.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from headrace import osys

LARGE = 1 << 20  # smaller tensors are none of a cache's
HUGE = 2 << 20  # a huge page


class MemfdArea:
    """Zeroed memory in a memfd that cannot shrink: address and size in this process, and the descriptor to lend."""

    def __init__(self, size: int, *, huge: bool = False, name: str = "headrace-kv") -> None:
        if size <= 0:
            raise ValueError(f"memory of {size} bytes: need at least one")
        self.wanted = size
        self.huge = huge
        self.fd, self.buffer = _allocate(name, size, huge)
        self.size = len(self.buffer)
        anchor = ctypes.c_char.from_buffer(self.buffer)
        self.address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from being closed

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether all of these bytes lie here."""
        return self.address <= address and address + nbytes <= self.address + self.size

    def close(self) -> None:
        """Gives the memory back. BufferError while a tensor lives in it."""
        self.buffer.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _allocate(name: str, size: int, huge: bool) -> tuple[int, mmap.mmap]:
    page = HUGE if huge else mmap.PAGESIZE
    whole = -(-size // page) * page
    try:
        fd = osys.memfd(name, whole, huge=huge)
    except OSError as e:
        raise MemoryError(_lacking(whole, huge, e)) from e
    try:
        return fd, mmap.mmap(fd, whole, mmap.MAP_SHARED)
    except OSError as e:
        os.close(fd)
        raise MemoryError(_lacking(whole, huge, e)) from e


def _lacking(size: int, huge: bool, e: OSError) -> str:
    if huge:
        need = -(-size // HUGE)
        return f"map {size} bytes of huge pages: {e.strerror}: {need} of 2 MiB must be free (vm.nr_hugepages), or do without them"
    return f"map {size} bytes of shared memory: {e.strerror}: less KV cache (VLLM_CPU_KVCACHE_SPACE), or more memory"


class MemfdPool:
    """A context manager: torch.zeros and torch.empty of at least `least` bytes on the CPU come from memfds meanwhile, of huge pages if
    asked for and free. What was allocated is found again by its address, and lives as long as the pool."""

    def __init__(self, *, huge: bool = False, least: int = LARGE) -> None:
        self.areas: list[MemfdArea] = []
        self.why_not_huge = ""
        self._huge, self._least = huge, least
        self._mode: contextlib.AbstractContextManager[Any] | None = None

    def __enter__(self) -> MemfdPool:
        self._mode = _mode(self._tensor)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        mode, self._mode = self._mode, None
        assert mode is not None
        mode.__exit__(kind, error, trace)

    def find(self, address: int, nbytes: int = 1) -> tuple[MemfdArea, int] | None:
        """The area that holds these bytes, and where in it they begin."""
        return next(((a, address - a.address) for a in self.areas if a.holds(address, nbytes)), None)

    def area(self, size: int) -> MemfdArea:
        """Allocates."""
        made = None
        if self._huge:
            try:
                made = MemfdArea(size, huge=True)
            except MemoryError as e:
                self.why_not_huge = str(e)
        made = made or MemfdArea(size)
        self.areas.append(made)
        return made

    def _tensor(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The tensor that func is asked for, or None where that is none of ours."""
        import torch  # noqa: PLC0415  (vLLM brings it; a client without tensors does without)

        if set(kwargs) - {"size", "dtype", "device", "requires_grad", "layout", "pin_memory"}:
            return None
        if kwargs.get("requires_grad") or kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
            return None
        device = kwargs.get("device")
        if torch.device(device if device is not None else torch.get_default_device()).type != "cpu":
            return None
        like = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        nbytes = like.numel() * like.element_size()
        if nbytes < self._least:
            return None
        flat = torch.frombuffer(self.area(nbytes).buffer, dtype=torch.uint8, count=nbytes)
        return flat.view(like.dtype).view(like.shape)


def _mode(tensor: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]) -> contextlib.AbstractContextManager[Any]:
    import torch  # noqa: PLC0415
    from torch.overrides import TorchFunctionMode  # noqa: PLC0415

    ours = (torch.zeros, torch.empty)  # both may be zeroed

    class Mode(TorchFunctionMode):  # type: ignore[misc,unused-ignore]  # torch may be absent where types are checked
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = tensor(func, args, kwargs or {}) if func in ours else None
            return func(*args, **(kwargs or {})) if made is None else made

    return Mode()
