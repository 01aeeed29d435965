"""Layouts of the tensors that vLLM registers."""

from __future__ import annotations

import struct

import pytest

from headrace.layout import CacheView, Undescribable, describe, fingerprint
from tests.test_protocol import DUMPS

BASE = 0x7F0000000000


def view(name: str, address: int, shape: tuple[int, ...], order: tuple[int, ...] | None = None, dtype: str = "float32") -> CacheView:
    """A dense tensor whose dimensions lie in memory in this order, the outermost first."""
    item = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}.get(dtype, 4)
    strides, step = [0] * len(shape), item
    for axis in reversed(order or tuple(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis]
    return CacheView(name, address, shape, tuple(strides), dtype, item)


def fields(layout: bytes) -> dict[str, int]:
    names = "version dtype flags layers blocks tokens planes heads head_first heads_total head_bytes rank ranks zero"
    names += " base layer block plane token head"
    return dict(zip(names.split(), struct.unpack("<BBH11I6Q", layout[:96]), strict=True))


def test_the_documents_layout() -> None:
    """F32, 2 layers, 8 blocks of 16 tokens, K and V, 3 heads of 64 numbers, contiguous, as FlashInfer's tensors have it."""
    size = 8 * 2 * 16 * 3 * 64 * 4
    caches = [view(f"layers.{i}.attn", BASE + i * size, (8, 2, 16, 3, 64)) for i in range(2)]
    d = describe(caches, blocks=8, block_tokens=16, heads_total=3, fingerprint=bytes([0x11]) * 32)
    assert d.layout(BASE).hex(" ") == DUMPS["LAYOUT"].hex(" ")
    assert (d.address, d.size, d.split) == (BASE, 2 * size, 1)
    assert d.words == "F32, 2 layers, 8 blocks of 16 tokens, 3 heads of 256 bytes, K and V apart, tokens before heads, rank 0 of 1"


def test_flash_attention_planes_outermost() -> None:
    d = describe([view("layers.0", BASE, (2, 8, 16, 3, 64))], blocks=8, block_tokens=16, heads_total=3)
    f = fields(d.layout(BASE - 4096))
    assert f["base"] == 4096
    assert f["plane"] == 8 * 16 * 3 * 256
    assert (f["block"], f["token"], f["head"], f["planes"]) == (16 * 3 * 256, 3 * 256, 256, 2)


def test_two_blocks_only() -> None:
    with pytest.raises(Undescribable, match="cannot be told"):
        describe([view("l", BASE, (2, 2, 16, 1, 64))], blocks=2, block_tokens=16)


def test_heads_before_tokens() -> None:
    d = describe(
        [view("l", BASE, (8, 2, 16, 3, 64), (0, 1, 3, 2, 4))], blocks=8, block_tokens=16, heads_total=6, rank=1, ranks=2, head_first=3
    )
    f = fields(d.layout(BASE))
    assert (f["token"], f["head"]) == (256, 16 * 256)
    assert (f["heads"], f["head_first"], f["heads_total"], f["rank"], f["ranks"]) == (3, 3, 6, 1, 2)
    assert d.words.endswith("heads before tokens, rank 1 of 2")


@pytest.mark.parametrize(("order", "token", "head"), [((0, 1, 2, 3), 512, 16 * 512), ((0, 2, 1, 3), 3 * 512, 512)], ids=["HNC", "NHC"])
def test_k_and_v_side_by_side(order: tuple[int, ...], token: int, head: int) -> None:
    size = 8 * 3 * 16 * 512
    caches = [view(f"layers.{i}.attn", BASE + i * size, (8, 3, 16, 256), order, "bfloat16") for i in (0, 1, 2, 10)[:3]]
    f = fields(describe(caches, blocks=8, block_tokens=16, heads_total=3).layout(BASE))
    assert (f["dtype"], f["planes"], f["head_bytes"], f["token"], f["head"], f["layer"], f["flags"]) == (3, 1, 512, token, head, size, 0)


def test_blocks_outside_of_layers() -> None:
    """BLHNC: a block's layers lie together."""
    page = 3 * 16 * 512
    caches = [CacheView(f"layers.{i}", BASE + i * page, (8, 3, 16, 256), (4 * page, 16 * 512, 512, 2), "bfloat16", 2) for i in range(4)]
    d = describe(caches, blocks=8, block_tokens=16, heads_total=3)
    f = fields(d.layout(BASE))
    assert (f["layer"], f["block"], d.size) == (page, 4 * page, 8 * 4 * page)


def test_latent_attention() -> None:
    f = fields(describe([view("l", BASE, (8, 64, 576), dtype="bfloat16")], blocks=8, block_tokens=64, rank=1, ranks=4).layout(BASE))
    assert (f["planes"], f["heads"], f["heads_total"], f["head_bytes"], f["rank"], f["ranks"]) == (1, 1, 1, 1152, 1, 4)


def test_blocks_that_kernels_split() -> None:
    d = describe([view("l", BASE, (32, 1, 16, 128))], blocks=8, block_tokens=64)
    assert (d.split, d.blocks, d.block_tokens) == (4, 32, 16)
    opaque = describe([view("l", BASE, (32, 1, 16, 128))], blocks=8, block_tokens=64, opaque=True)
    assert (opaque.split, opaque.blocks, opaque.block_tokens) == (1, 8, 64)


def test_opaque() -> None:
    size = 8 * 3 * 32 * 256
    d = describe(
        [view(f"l.{i}", BASE + i * size, (8, 3, 32, 128), dtype="bfloat16") for i in range(2)],
        blocks=8,
        block_tokens=32,
        heads_total=3,
        opaque=True,
    )
    f = fields(d.layout(BASE))
    assert (f["flags"], f["planes"], f["heads"], f["head_bytes"], f["head"], f["token"]) == (2, 1, 3, 256, 256, 3 * 256)
    assert f["token"] * f["tokens"] == f["block"] == 3 * 32 * 256
    assert "opaque" in d.words


def test_groups_share_places() -> None:
    """A hybrid cache: each place holds a layer of each group."""
    caches = [view(n, BASE + p * 4096 * 8, (8, 1, 16, 64)) for p, names in enumerate([("l.0", "l.2"), ("l.1", "l.3")]) for n in names]
    d = describe(caches, blocks=8, block_tokens=16)
    assert d.layers == (("l.0", "l.2"), ("l.1", "l.3"))
    assert fields(d.layout(BASE))["layers"] == 2


@pytest.mark.parametrize(
    ("caches", "why"),
    [
        ([], "no tensor"),
        ([view("l", BASE, (8, 16, 3, 64, 1, 1))], "has the shape"),
        ([view("l", BASE, (3, 8, 16, 3, 64))], "neither"),
        ([view("l", BASE, (8, 1, 16, 64), dtype="complex64")], "is of complex64"),
        ([view("l", BASE, (8, 1, 16, 64), (0, 1, 3, 2))], "side by side"),
        ([view("l", BASE, (8, 1, 1, 4096))], "recurrent state"),
        ([view("l", BASE, (9, 1, 16, 64))], "recurrent state"),
        ([view("a", BASE, (8, 1, 16, 64)), view("b", BASE + 32768, (8, 1, 16, 32))], "b .* laid out otherwise than a"),
        ([view("a", BASE, (8, 1, 16, 64)), view("b", BASE + 32768, (8, 1, 16, 64), dtype="int8")], "laid out otherwise"),
        ([view("a", BASE, (8, 1, 16, 64)), view("b", BASE, (8, 1, 16, 32))], "shares its memory"),
        ([view(f"l.{i}", BASE + at, (8, 1, 16, 64)) for i, at in enumerate((0, 32768, 81920))], "l.2 lies 49152 bytes behind .*evenly"),
        ([view("a", BASE, (8, 1, 16, 64)), view("b", BASE + 64, (8, 1, 16, 64))], "interleaved"),
    ],
)
def test_refused_with_the_reason(caches: list[CacheView], why: str) -> None:
    with pytest.raises(Undescribable, match=why):
        describe(caches, blocks=8, block_tokens=16)


def test_opaque_refused_with_the_reason() -> None:
    with pytest.raises(Undescribable, match="spread over"):  # heads outside of blocks
        describe([view("l", BASE, (8, 3, 32, 128), (1, 0, 2, 3))], blocks=8, block_tokens=32, heads_total=3, opaque=True)
    with pytest.raises(Undescribable, match="does not divide"):
        describe([view("l", BASE, (8, 3, 5))], blocks=8, block_tokens=16, opaque=True)
    with pytest.raises(Undescribable, match="recurrent state"):
        describe([view("l", BASE, (8, 1, 1, 512))], blocks=8, block_tokens=32, opaque=True)


def test_a_state_of_several_tensors() -> None:
    with pytest.raises(Undescribable, match="2 tensors: a recurrent state"):
        CacheView.of("mamba", [object(), object()])


def test_heads_beyond_the_models() -> None:
    with pytest.raises(Undescribable, match="heads 2 to 5 of 4"):
        describe([view("l", BASE, (8, 3, 16, 64))], blocks=8, block_tokens=16, heads_total=4, head_first=2)


def test_a_region_that_begins_later() -> None:
    with pytest.raises(ValueError, match="before the region"):
        describe([view("l", BASE, (8, 1, 16, 64))], blocks=8, block_tokens=16).layout(BASE + 1)


def test_fingerprint() -> None:
    one = fingerprint(model="m", dtype="bf16")
    assert len(one) == 32
    assert one == fingerprint(dtype="bf16", model="m")
    assert one != fingerprint(dtype="bf16", model="n")
