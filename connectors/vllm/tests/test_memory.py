"""KV cache in memfds."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest

from headrace import osys
from headrace.memory import HUGE, MemfdArea, MemfdPool


def test_area() -> None:
    area = MemfdArea((1 << 20) + 1)
    assert area.size == (1 << 20) + mmap.PAGESIZE
    seals = fcntl.fcntl(area.fd, osys.F_GET_SEALS)
    assert seals & osys.SEAL_SHRINK
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(area.fd, 4096)
    area.buffer[5:9] = b"byte"
    assert os.pread(area.fd, 4, 5) == b"byte"  # as the daemon sees it
    assert area.holds(area.address, area.size)
    assert not area.holds(area.address, area.size + 1)
    assert not area.holds(area.address - 1, 1)
    area.close()
    area.close()


def test_no_memory_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="at least one"):
        MemfdArea(0)
    with pytest.raises(MemoryError, match="VLLM_CPU_KVCACHE_SPACE"):
        MemfdArea(1 << 50)


def test_huge_pages_or_why_not() -> None:
    pool = MemfdPool(huge=True)
    area = pool.area(HUGE + 1)
    assert area.size == 2 * HUGE if area.huge else "vm.nr_hugepages" in pool.why_not_huge
    area.close()


def test_addresses_lead_back() -> None:
    pool = MemfdPool()
    first, second = pool.area(1 << 20), pool.area(1 << 21)
    assert pool.find(second.address + 4096, 8192) == (second, 4096)
    assert pool.find(first.address) == (first, 0)
    assert pool.find(second.address + (1 << 21) - 1, 2) in (None, (first, second.address + (1 << 21) - 1 - first.address))
    assert pool.find(1) is None


def test_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch comes with vLLM's environment: make vllm")
    from headrace.layout import CacheView, describe  # noqa: PLC0415

    with MemfdPool() as pool:
        cache = torch.zeros(1 << 21, dtype=torch.int8, device=torch.device("cpu"))
        shaped = torch.empty((4, 2, 64, 1024), dtype=torch.bfloat16)
        small = torch.zeros(16)
        meta = torch.zeros(1 << 21, device="meta")
        ones = torch.ones(1 << 20)
    after = torch.zeros(1 << 21)
    assert [a.wanted for a in pool.areas] == [1 << 21, 1 << 20]
    for t in (small, ones, after):
        assert pool.find(t.data_ptr()) is None
    assert meta.device.type == "meta"
    assert shaped.shape == (4, 2, 64, 1024)
    assert shaped.dtype is torch.bfloat16
    assert not cache.any()
    layers = [cache[i << 20 : (i + 1) << 20].view(torch.bfloat16).view(8, 4, 32, 512) for i in range(2)]
    layers[1][3, 2, 1, 7] = 1.0
    at = (1 << 20) + ((3 * 4 + 2) * 32 + 1) * 1024 + 14
    assert os.pread(pool.areas[0].fd, 2, at) == b"\x80\x3f"
    found = pool.find(layers[1].data_ptr(), 1 << 20)
    assert found == (pool.areas[0], 1 << 20)
    d = describe([CacheView.of(f"layers.{i}", t) for i, t in enumerate(layers)], blocks=8, block_tokens=32, heads_total=4, opaque=True)
    assert (d.address, d.size) == (pool.areas[0].address, 1 << 21)
