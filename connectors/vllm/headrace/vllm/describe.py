"""What this engine is: what must be equal at P and D for KV to mean the same, and what no layout can say."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from headrace.vllm.groups import Groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager

SAMPLE_BYTES = 1 << 16  # of each end of a file of weights
WINDOWS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)  # kinds of layers that look back over a part of the prompt alone


class Unfit(ValueError):
    """This engine's KV cache cannot be lent. The text says why and what to do."""


def is_cpu(config: VllmConfig) -> bool:
    return bool(config.device_config.device_type == "cpu")


def check(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Raises Unfit for what could not be moved, before the engine serves anything."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise Unfit(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: the ranks of one engine must hold the same layers; "
            "use tensor parallelism"
        )
    if parallel.data_parallel_size > 1:
        raise Unfit(
            f"data_parallel_size is {parallel.data_parallel_size}: a ticket names one engine; run one vllm serve for each replica "
            "and let the router choose among them"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise Unfit(
            "context parallelism spreads a block's tokens over ranks, which no layout describes: "
            "set decode_context_parallel_size and prefill_context_parallel_size to 1"
        )
    _check_groups(caches)
    if config.kv_transfer_config is not None and config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise Unfit(
            'kv_load_failure_policy is "fail", so that every transfer that fails would fail its request: '
            'set "kv_load_failure_policy":"recompute" in --kv-transfer-config'
        )


def _check_groups(caches: KVCacheConfig) -> None:
    groups = caches.kv_cache_groups
    for group in groups:
        if not group.enable_kv_transfer or group.host_resident:
            raise Unfit(f"the KV cache of {_name(group)} is not meant to be handed over, or lies in the host's memory")
        for spec in _specs(group.kv_cache_spec):
            # A window's kinds by their very names: what is made from them keeps other tokens than they do
            if not isinstance(spec, FullAttentionSpec | MLAAttentionSpec) and type(spec) not in WINDOWS:
                raise Unfit(
                    f"the KV cache of {_name(group)} is of kind {type(spec).__name__}: "
                    "only attention's KV, of all tokens or of a window, can be handed over"
                )
    if spread(caches):
        first = next(_specs(groups[0].kv_cache_spec))
        for group in groups:
            for spec in _specs(group.kv_cache_spec):
                unequal = (spec.block_size, spec.page_size_bytes) != (first.block_size, first.page_size_bytes)
                if unequal or spec.page_size_padded is not None:
                    raise Unfit(
                        f"the model's KV cache has {len(groups)} groups with blocks of unequal size: {_page(first)} in {_name(groups[0])}, "
                        f"{_page(spec)} in {_name(group)}: start vLLM with --disable-hybrid-kv-cache-manager"
                    )


def _name(group: Any) -> str:
    more = f" and {len(group.layer_names) - 1} more" if len(group.layer_names) > 1 else ""
    return f"{group.layer_names[0]}{more}" if group.layer_names else "a group without layers"


def _page(spec: Any) -> str:
    padded = ", padded" if getattr(spec, "page_size_padded", None) is not None else ""
    return f"{spec.block_size} tokens in {spec.page_size_bytes} bytes{padded}"


def spread(caches: KVCacheConfig) -> bool:
    """Whether one table of blocks, of all of a prompt's tokens, does not say it all."""
    return len(caches.kv_cache_groups) > 1 or any(type(s) in WINDOWS for g in caches.kv_cache_groups for s in _specs(g.kv_cache_spec))


def groups(caches: KVCacheConfig, manager: KVCacheManager) -> Groups:
    """What the scheduler's half is to know of the groups; where a window begins vLLM's managers of the groups say themselves."""
    single = manager.coordinator.single_type_managers
    skipped = tuple(m.get_num_skipped_tokens if type(m.kv_cache_spec) in WINDOWS else None for m in single)
    return Groups(int(caches.kv_cache_groups[0].kv_cache_spec.block_size), skipped, int(manager.block_pool.null_block.block_id))


def group_words(caches: KVCacheConfig) -> str:
    """For the log: "2 groups: all tokens, window of 1024 tokens"; empty where there is but one table."""
    if not spread(caches):
        return ""
    words = [_window(next(_specs(g.kv_cache_spec))) or "all tokens" for g in caches.kv_cache_groups]
    return f"{len(words)} groups: {', '.join(words)}" if len(words) > 1 else words[0]


def _window(spec: Any) -> str:
    if isinstance(spec, SlidingWindowSpec):
        return f"window of {spec.sliding_window} tokens"
    return f"chunks of {spec.attention_chunk_size} tokens" if isinstance(spec, ChunkedLocalAttentionSpec) else ""


def _specs(spec: Any) -> Iterator[Any]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def facts(config: VllmConfig, caches: KVCacheConfig, backends: list[str]) -> dict[str, Any]:
    """Everything that changes the bytes of KV, for the fingerprint."""
    model, cache = config.model_config, config.cache_config
    about: dict[str, Any] = {
        "vllm": vllm.__version__,
        "model": _architecture(model),
        "weights": _weights(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "cache_dtype": str(cache.cache_dtype),
        "layers": len(caches.kv_cache_groups[0].layer_names),
        "layout": str(caches.kv_cache_layout or ""),
        "backends": backends,
        "speculative": str(config.speculative_config.method) if config.speculative_config is not None else "",
    }
    if spread(caches):  # P's list of blocks must be D's
        about["groups"] = [
            [int(g.kv_cache_spec.block_size), sorted(g.layer_names), sorted({_window(s) for s in _specs(g.kv_cache_spec)})]
            for g in caches.kv_cache_groups
        ]
    if is_cpu(config):  # the inside of a block depends on it
        about["isa"] = _isa()
        about["torch"] = torch.__version__
    return about


def _architecture(model: Any) -> dict[str, Any]:
    """The model's configuration, less where it lies and which library wrote it."""
    aside = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}

    def of(value: Any) -> Any:
        return {k: of(v) for k, v in value.items() if k not in aside} if isinstance(value, dict) else value

    doc: dict[str, Any] = of(json.loads(json.dumps(model.hf_config.to_dict(), default=str, sort_keys=True)))
    return doc


def _weights(model: Any) -> str:
    """Who the weights are, as far as a look at both ends of each file tells; a name where there are no files."""
    folder = str(model.model)
    if not os.path.isdir(folder):
        return f"{folder}@{model.revision or ''}"
    h = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if not name.endswith((".safetensors", ".bin", ".pt", ".gguf")):
            continue
        path = os.path.join(folder, name)
        size = os.path.getsize(path)
        h.update(f"{name} {size}\n".encode())
        with open(path, "rb") as f:
            h.update(f.read(SAMPLE_BYTES))
            f.seek(max(0, size - SAMPLE_BYTES))
            h.update(f.read(SAMPLE_BYTES))
    return h.hexdigest()


def _isa() -> str:
    caps = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "unknown")()
    tiles = ""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
            flags = next((line for line in f if line.startswith(("flags", "Features"))), "").split()
        tiles = "+".join(sorted(set(flags) & {"amx_bf16", "amx_tile", "avx512_bf16", "bf16", "asimd", "sve"}))
    except OSError:
        pass
    return f"{platform.machine()} {caps} {tiles}"


def prompt_extra(request: Any) -> list[object]:
    """What vLLM's own block hash takes in beside the tokens."""
    extra: list[object] = []
    if request.lora_request is not None:
        extra.append(["lora", request.lora_request.lora_name, request.lora_request.lora_path])
    extra += [["mm", f.identifier, f.mm_position.offset, f.mm_position.length] for f in request.mm_features or ()]
    if request.cache_salt:
        extra.append(["salt", request.cache_salt])
    if request.prompt_embeds is not None:
        data = request.prompt_embeds.contiguous().view(torch.uint8).numpy().tobytes()
        extra.append(["embeds", str(request.prompt_embeds.dtype), hashlib.sha256(data).hexdigest()])
    return extra
