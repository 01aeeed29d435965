"""What lies where in the tensors that an engine registers as its KV cache: the Layout of docs/protocol.md, or the reason why none fits.

Forms that are known, by their number of dimensions (vLLM's logical order; strides say the order in memory):

    4  (blocks, heads, tokens, content)            vLLM since 0.3x: K and V of a token and head lie side by side, and move as one
    5  (2, blocks, tokens, heads, size)            FlashAttention's before that
       (blocks, 2, tokens, heads, size)            FlashInfer's
    3  (blocks, tokens, content)                   multi-head latent attention: one head, which every rank holds

Where the engine's kernels cut a block of its block manager into several, so does the layout (Described.split): block b of the manager is
then blocks b*split to b*split+split-1. An opaque layout says nothing about a block's inside, and moves whole blocks only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3, "int8": 4, "uint8": 4, "float8_e4m3fn": 5, "float8_e5m2": 6}
_NAMES = {1: "F32", 2: "F16", 3: "BF16", 4: "I8", 5: "F8_E4M3", 6: "F8_E5M2"}
REVERSED, OPAQUE = 1, 2
_LAYOUT = struct.Struct("<BBH11I6Q32s")


class Undescribable(ValueError):
    """No layout fits; the text says which tensor and why."""


@dataclass(frozen=True)
class CacheView:
    """A registered tensor: strides in bytes."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @classmethod
    def of(cls, name: str, tensor: Any) -> CacheView:
        """Of a torch tensor."""
        if isinstance(tensor, (list, tuple)):
            raise Undescribable(f"{name} is {len(tensor)} tensors: a recurrent state (Mamba), which has no blocks of tokens")
        size = int(tensor.element_size())
        strides = tuple(int(s) * size for s in tensor.stride())
        return cls(name, int(tensor.data_ptr()), tuple(map(int, tensor.shape)), strides, str(tensor.dtype).removeprefix("torch."), size)


@dataclass(frozen=True)
class Described:
    """A cache that a daemon can be told about."""

    address: int  # of the lowest byte
    size: int  # to the highest
    layers: tuple[tuple[str, ...], ...]  # names of the tensors at each layer's place: groups of a hybrid cache share places
    split: int  # blocks of the layout in a block of the engine's manager
    block_tokens: int
    blocks: int
    opaque: bool
    words: str
    _fields: tuple[int, ...] = field(repr=False)
    _strides: tuple[int, ...] = field(repr=False)
    _fingerprint: bytes = field(repr=False)

    def layout(self, origin: int) -> bytes:
        """The 128 bytes, for a region whose first byte is at this address."""
        if origin > self.address:
            raise ValueError(f"the cache begins {origin - self.address} bytes before the region")
        base = self.address - origin
        dtype, flags, *numbers = self._fields
        return _LAYOUT.pack(1, dtype, flags, *numbers, 0, base, *self._strides, self._fingerprint)


@dataclass(frozen=True)
class _Shape:
    """One layer, in the Layout's terms."""

    blocks: int
    tokens: int
    planes: int
    heads: int
    head_bytes: int
    block_stride: int
    plane_stride: int
    token_stride: int
    head_stride: int
    kind: str

    def dims(self) -> list[tuple[str, int, int]]:
        return [
            ("block", self.blocks, self.block_stride),
            ("plane", self.planes, self.plane_stride),
            ("token", self.tokens, self.token_stride),
            ("head", self.heads, self.head_stride),
        ]


def fingerprint(**facts: object) -> bytes:
    """32 bytes that are equal where all facts are."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str).encode()).digest()


def describe(
    caches: Sequence[CacheView],
    *,
    blocks: int,
    block_tokens: int,
    rank: int = 0,
    ranks: int = 1,
    head_first: int = 0,
    heads_total: int = 1,
    fingerprint: bytes = bytes(32),
    opaque: bool = False,
) -> Described:
    """Describes tensors whose block manager has so many blocks of so many tokens. Undescribable says why it cannot."""
    places = _places(caches)
    views = [group[0] for group in places]
    shapes = [_opaque(v, blocks, block_tokens, heads_total // ranks or 1) if opaque else _shape(v, blocks) for v in views]
    _same(views, shapes)
    shape = shapes[0]
    shared = [] if opaque else [v for group in places for v in group[1:]]
    for v in shared:
        if _shape(v, blocks) != shape:
            raise Undescribable(f"{v.name} shares its memory with a layer of another shape: only whole blocks could move")
    if shape.blocks % blocks or shape.tokens * (shape.blocks // blocks) != block_tokens:
        raise Undescribable(
            f"{views[0].name} holds {shape.blocks} blocks of {shape.tokens} states, the manager has {blocks} of {block_tokens} tokens: "
            "a recurrent state or a compressed cache is not described by tokens"
        )
    layer_stride = _layer_stride(views)
    size = _extent(len(views), layer_stride, shape)
    if head_first + shape.heads > heads_total:
        raise Undescribable(f"heads {head_first} to {head_first + shape.heads} of {heads_total}: they do not fit the model's")
    dtype = DTYPES[views[0].dtype]
    numbers = (len(views), shape.blocks, shape.tokens, shape.planes, shape.heads, head_first, heads_total, shape.head_bytes, rank, ranks)
    return Described(
        address=views[0].address,
        size=size,
        layers=tuple(tuple(v.name for v in group) for group in places),
        split=shape.blocks // blocks,
        block_tokens=shape.tokens,
        blocks=shape.blocks,
        opaque=opaque,
        words=_words(len(views), shape, _NAMES[dtype], rank, ranks),
        _fields=(dtype, OPAQUE if opaque else 0, *numbers),
        _strides=(layer_stride, shape.block_stride, shape.plane_stride, shape.token_stride, shape.head_stride),
        _fingerprint=fingerprint,
    )


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _places(caches: Sequence[CacheView]) -> list[list[CacheView]]:
    """The tensors by address: a cache's groups, and layers that share one, lie at the same."""
    if not caches:
        raise Undescribable("there is no KV cache: no tensor was registered")
    at: dict[int, list[CacheView]] = {}
    for view in sorted(caches, key=lambda v: (v.address, _natural(v.name))):
        if view.dtype not in DTYPES:
            raise Undescribable(f"{view.name} is of {view.dtype}: caches can be of {', '.join(DTYPES)}")
        at.setdefault(view.address, []).append(view)
    return list(at.values())


def _shape(v: CacheView, blocks: int) -> _Shape:
    s, t, item = v.shape, v.strides, v.itemsize
    if t and t[-1] != item and s[-1] != 1:
        raise Undescribable(f"{v.name}: the numbers of a head lie {t[-1]} bytes apart, they must be side by side")
    match len(s):
        case 3:
            return _Shape(s[0], s[1], 1, 1, s[2] * item, t[0], s[2] * item, t[1], s[2] * item, "latent")
        case 4:
            return _Shape(s[0], s[2], 1, s[1], s[3] * item, t[0], s[3] * item, t[2], t[1], "K and V side by side")
        case 5:
            plane = _plane_axis(v, blocks)
            return _Shape(s[1 - plane], s[2], 2, s[3], s[4] * item, t[1 - plane], t[plane], t[2], t[3], "K and V apart")
    raise Undescribable(f"{v.name} has the shape {s}: known are (blocks, heads, tokens, content), (2, blocks, tokens, heads, size), "
                        "(blocks, 2, tokens, heads, size) and (blocks, tokens, content)")  # fmt: skip


def _plane_axis(v: CacheView, blocks: int) -> int:
    fits = [p for p in (0, 1) if v.shape[p] == 2 and v.shape[1 - p] % blocks == 0]
    if not fits:
        raise Undescribable(f"{v.name} has the shape {v.shape}: neither (2, {blocks}, ...) nor ({blocks}, 2, ...)")
    if len(fits) == 2:
        raise Undescribable(f"{v.name} has the shape {v.shape}: of which dimension K and V are cannot be told with two blocks")
    return fits[0]


def _opaque(v: CacheView, blocks: int, block_tokens: int, heads: int) -> _Shape:
    """A block is its bytes, whatever they mean; they must lie together."""
    if len(v.shape) < 2 or v.shape[0] % blocks:
        raise Undescribable(f"{v.name} has the shape {v.shape}: its first dimension is not that of the manager's {blocks} blocks")
    split = v.shape[0] // blocks
    if len(v.shape) == 4 and v.shape[2] * split != block_tokens:
        raise Undescribable(
            f"{v.name} holds {v.shape[2] * split} states a block of {block_tokens} tokens: a recurrent state or a compressed cache "
            "is not described by tokens"
        )
    inner = math.prod(v.shape[1:]) * v.itemsize
    reach = v.itemsize + sum((n - 1) * s for n, s in zip(v.shape[1:], v.strides[1:], strict=True))
    if reach != inner or v.strides[0] < inner or (split > 1 and v.strides[0] != inner):
        raise Undescribable(
            f"{v.name}: a block's {inner} bytes are spread over {reach}, {v.strides[0]} apart: set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    block, stride = inner * split, v.strides[0] * split
    if block % (block_tokens * heads):
        heads = 1
    if block % block_tokens:
        raise Undescribable(f"{v.name}: a block of {block} bytes does not divide into {block_tokens} tokens")
    head_bytes = block // (block_tokens * heads)
    return _Shape(blocks, block_tokens, 1, heads, head_bytes, stride, block, heads * head_bytes, head_bytes, "opaque")


def _same(views: Sequence[CacheView], shapes: Sequence[_Shape]) -> None:
    for v, s in zip(views, shapes, strict=True):
        if s != shapes[0] or v.dtype != views[0].dtype:
            raise Undescribable(
                f"{v.name} ({v.dtype}, {_block_words(s)}) is laid out otherwise than "
                f"{views[0].name} ({views[0].dtype}, {_block_words(shapes[0])}): "
                "layers of different kinds cannot be described as one cache"
            )


def _block_words(s: _Shape) -> str:
    return f"{s.blocks} blocks of {s.tokens} tokens, {s.heads} heads of {s.head_bytes} bytes"


def _layer_stride(views: Sequence[CacheView]) -> int:
    steps = [b.address - a.address for a, b in itertools.pairwise(views)]
    for step, v in zip(steps, views[1:], strict=True):
        if step != steps[0]:
            raise Undescribable(
                f"{v.name} lies {step} bytes behind the layer before it, {views[1].name} {steps[0]}: layers must be evenly spaced; "
                "PyTorch may have allocated them one by one (vLLM before 0.3x)"
            )
    return steps[0] if steps else 0


def _extent(layers: int, layer_stride: int, shape: _Shape) -> int:
    """Bytes from the first to the last. Dimensions must be nested: each steps over all that is inside it."""
    dims = [d for d in [("layer", layers, layer_stride), *shape.dims()] if d[1] > 1]
    extent = shape.head_bytes
    for name, count, stride in sorted(dims, key=lambda d: d[2]):
        if stride < extent:
            raise Undescribable(f"{name}s lie {stride} bytes apart, and one spreads over {extent}: the cache's dimensions are interleaved")
        extent += (count - 1) * stride
    return extent


def _words(layers: int, s: _Shape, dtype: str, rank: int, ranks: int) -> str:
    order = "heads before tokens" if s.head_stride > s.token_stride else "tokens before heads"
    inside = s.kind if s.kind == "opaque" else f"{s.kind}, {order}" if s.heads > 1 else s.kind
    return f"{dtype}, {layers} layers, {_block_words(s)}, {inside}, rank {rank} of {ranks}"
