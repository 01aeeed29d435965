"""What vLLM calls. Everything that decides lies in control and worker; this is the thin skin that knows vLLM's types."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from headrace import layout
from headrace.client import Client, Refusal, Unavailable
from headrace.cuda import CudaError, Gpu, lend
from headrace.memory import MemfdPool
from headrace.vllm import describe
from headrace.vllm.control import WAIT_S, Control
from headrace.vllm.meta import Answer, Step
from headrace.vllm.params import Offer, digest
from headrace.vllm.stats import HeadracePromMetrics, HeadraceStats
from headrace.vllm.worker import Member

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.headrace")  # below vllm's, so that it is shown as vLLM's own lines are

START_S = 10.0  # how long the start waits for the node daemon
SOCKET = "/run/headrace/node.sock"
DONE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class StepMetadata(KVConnectorMetadata):
    step: Step = field(default_factory=Step)


@dataclass
class WorkerAnswer(KVConnectorWorkerMetadata):
    answer: Answer = field(default_factory=Answer)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerAnswer)
        return WorkerAnswer(self.answer.join(other.answer))


@dataclass
class Lent(KVConnectorHandshakeMetadata):
    """What a rank lends, for the scheduler's half to tell the daemon."""

    fingerprint: str
    layout: str
    opaque: bool


class _DeviceGate:
    """Passed when what was queued on the current stream before it is done."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class _Pool:
    """References of our own to blocks: vLLM gives none of them to a request meanwhile."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def keep(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[b] for b in blocks])

    def release(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[b] for b in reversed(blocks)])


class HeadraceConnector(KVConnectorBase_V1, SupportsHMA):
    """KV transfer through Headrace's node daemons."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        describe.check(vllm_config, kv_cache_config)
        config = self._kv_transfer_config
        self._socket = str(config.get_from_extra_config("headrace_socket", os.environ.get("HEADRACE_SOCKET", SOCKET)))
        engine = config.get_from_extra_config("headrace_engine", os.environ.get("HEADRACE_ENGINE_ID", ""))
        self._engine = str(engine or config.engine_id)
        self._block_tokens = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._pool: MemfdPool | None = None
        self._member: Member | None = None
        self._lent: Lent | None = None
        self._answer = False
        self._control: Control | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._control = self._start_control()

    # --- the scheduler's side

    def _start_control(self) -> Control:
        config, caches = self._vllm_config, self._kv_cache_config
        self._client = Client(self._socket, self._engine, about=None, ring=False)
        ranks = config.parallel_config.tensor_parallel_size
        control = Control(
            self._client,
            block_tokens=self._block_tokens,
            block_bytes=sum(spec.page_size_bytes for spec in _layer_specs(caches)) * ranks,
            log=_log,
            wait_s=float(self._kv_transfer_config.get_from_extra_config("headrace_wait_s", WAIT_S)),
        )
        _wait(self._client, "scheduler")
        return control

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        lent = [m for _, m in sorted(metadata.items()) if isinstance(m, Lent)]
        prints = {m.fingerprint for m in lent}
        if len(prints) > 1:
            raise describe.Unfit(
                f"the ranks of this engine differ in what they hold ({', '.join(sorted(prints))}): start them from the same files"
            )
        if not lent:
            return
        config = self._vllm_config
        names = config.model_config.served_model_name
        about = {
            "engine": "vllm",
            "version": vllm.__version__,
            "model": names[0] if isinstance(names, list) else names,
            "block_tokens": self._block_tokens,
            "blocks": self._kv_cache_config.num_blocks,
            "context_tokens": config.model_config.max_model_len,
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "fingerprint": lent[0].fingerprint,
            "opaque": lent[0].opaque,
            "layout": lent[0].layout,
        }
        self._client.describe(about)
        self._control_().poll()
        logger.info(
            "Headrace: engine %s at node %s (%s, data address %s); KV cache of %d rank(s) lent: %s%s; fingerprint %s; "
            "async scheduling %s",
            self._engine,
            self._client.node or "?",
            self._socket,
            self._client.address or "none",
            len(lent),
            lent[0].layout,
            f", {words}" if (words := describe.group_words(self._kv_cache_config)) else "",
            lent[0].fingerprint,
            "on" if config.scheduler_config.async_scheduling else "off",
        )

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._control_().manage(describe.groups(self._kv_cache_config, kv_cache_manager), _Pool(kv_cache_manager.block_pool))

    def on_new_request(self, request: Request) -> None:
        self._control_().added(request.request_id, request.kv_transfer_params, lambda: _offer(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        n = self._control_().matched(request.request_id, num_computed_tokens, bool(request.skip_reading_prefix_cache))
        return n, bool(n)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        del request
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        # What a request with further tokens to come writes beside the prompt's last ones would change bytes that are on their way
        prompt = request.num_prompt_tokens
        tokens = prompt if request.max_tokens == 1 else prompt // self._block_tokens * self._block_tokens
        self._control_().allocated(request.request_id, num_external_tokens, blocks.get_block_ids(), tokens, lambda: _offer(request))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        control = self._control_()
        if scheduler_output.preempted_req_ids:
            control.preempted(sorted(scheduler_output.preempted_req_ids))
        scheduled = scheduler_output.num_scheduled_tokens
        state = scheduler_output.kv_connector_block_state
        cached = scheduler_output.scheduled_cached_reqs
        before = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req in control.sends_for(before):
            control.sends.advance(req, before[req] + scheduled[req], lambda req=req: state.resolve_block_ids(req))  # type: ignore[misc]
        empty = scheduler_output.total_num_scheduled_tokens == 0 and self._vllm_config.max_concurrent_batches == 1
        return StepMetadata(control.step(empty=empty))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        answer = meta.answer if isinstance(meta, WorkerAnswer) else None
        sent, received = self._control_().answered(answer, connector_output.finished_recving or ())
        # A lease's end is heard here, once for all ranks: the workers need not be asked for it
        if sent:
            connector_output.finished_sending = (connector_output.finished_sending or set()) | sent
        if received:
            connector_output.finished_recving = (connector_output.finished_recving or set()) | received

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        return self._control_().finished(request.request_id, request.status not in DONE)

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        return self._control_().finished(request.request_id, request.status not in DONE)

    def has_pending_push_work(self) -> bool:
        return self._control_().idle()

    def has_pending_block_frees(self) -> bool:
        return self._control_().sends.settling

    @property
    def requires_kv_delivery(self) -> bool:
        # A preempted prefill's lease is revoked and its decode computes the prompt: computing it here again would help nobody
        return False

    # --- a worker's side

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        if not describe.is_cpu(self._vllm_config):
            return None  # a GPU's memory is exported where it lies
        self._pool = MemfdPool()
        pool: AbstractContextManager[Any] = self._pool
        return pool

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank  # noqa: PLC0415 - not before the groups are there

        config = self._vllm_config
        rank, ranks = get_tensor_model_parallel_rank(), config.parallel_config.tensor_parallel_size
        total = int(config.model_config.get_total_num_kv_heads())
        cpu = describe.is_cpu(config)
        facts = describe.facts(config, self._kv_cache_config, _backends(config, kv_caches))
        fingerprint = layout.fingerprint(**facts)
        try:
            described = layout.describe(
                [layout.CacheView.of(name, tensor) for name, tensor in kv_caches.items()],
                blocks=self._kv_cache_config.num_blocks,
                rank=rank,
                ranks=ranks,
                heads_total=total,
                head_first=rank * total // ranks,
                block_tokens=self._block_tokens,
                fingerprint=fingerprint,
                opaque=cpu,  # the inside of a block is the attention kernel's secret there
            )
        except layout.Undescribable as err:
            raise describe.Unfit(f"the KV cache of rank {rank} cannot be lent: {err}") from err
        if described.split != 1:
            raise describe.Unfit(
                f"the attention backend cuts a block of {self._block_tokens} tokens into {described.split}: "
                f"start vLLM with --block-size {described.block_tokens}"
            )
        client = Client(self._socket, f"{self._engine}/{rank}", join=self._engine)
        gpu = None if cpu else self._lend_gpu(client, described)
        if cpu:
            self._lend(client, described)
        _wait(client, f"rank {rank}")
        self._lent = Lent(fingerprint.hex(), described.words, described.opaque)
        specs = _layer_specs(self._kv_cache_config)
        self._member = Member(
            client,
            rank=rank,
            layers=described.layers,
            layer_block_bytes=specs[0].page_size_bytes,
            gate=None if cpu else _DeviceGate,
            log=_log,
            arrive=gpu.flush if gpu is not None else None,
        )
        logger.info("Headrace: rank %d of %d lends %d MiB to %s: %s", rank, ranks, described.size >> 20, self._socket, described.words)

    def _lend(self, client: Client, described: layout.Described) -> None:
        assert self._pool is not None, "vLLM did not ask for the memory pool"
        found = self._pool.find(described.address, described.size)
        if found is None:
            raise describe.Unfit("vLLM placed the KV cache outside of the connector's memory: is another memory pool configured?")
        area, _ = found
        client.lend(area.fd, area.size, described.layout(area.address))

    def _lend_gpu(self, client: Client, described: layout.Described) -> Gpu:
        """A GPU's memory goes as it is: NICs read and write it."""
        try:
            return lend(client, torch.cuda.current_device(), described)
        except CudaError as err:
            raise describe.Unfit(f"the GPU's memory cannot be lent, and this connector does not stage it over the host's: {err}") from err

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._lent

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs  # the daemon loads, between steps

    def wait_for_layer_load(self, layer_name: str) -> None:
        del layer_name  # a request is not scheduled before all of its KV is there

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._member is not None and isinstance(connector_metadata, StepMetadata):
            self._member.begin(connector_metadata.step)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        del kv_layer, attn_metadata, kwargs
        if self._member is not None:
            self._member.layer(layer_name)

    def wait_for_save(self) -> None:
        if self._member is not None:
            self._member.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        del finished_req_ids
        meta = self._connector_metadata
        failed = set(meta.step.failed) if isinstance(meta, StepMetadata) else set()
        self._answer = isinstance(meta, StepMetadata) and meta.step.beat
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._member is None:
            return None
        answer = self._member.answer(self._answer)
        return WorkerAnswer(answer) if answer is not None else None

    # --- both

    def shutdown(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._member is not None:
            self._member.close()

    def get_kv_connector_stats(self) -> HeadraceStats | None:
        data = self._control.tally.take() if self._control is not None else None
        return HeadraceStats(data) if data is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HeadraceStats:
        return HeadraceStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> HeadracePromMetrics:
        return HeadracePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _control_(self) -> Control:
        assert self._control is not None, "a call of the scheduler's side came to a worker"
        return self._control


def _offer(request: Request) -> Offer:
    return Offer(request.num_prompt_tokens, digest(request.prompt_token_ids or [], describe.prompt_extra(request)))


def _layer_specs(caches: KVCacheConfig) -> list[Any]:
    """Of the largest group's layers: a block has as many pages."""
    group = max(caches.kv_cache_groups, key=lambda g: len(g.layer_names))
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [per_layer[name] if per_layer is not None else group.kv_cache_spec for name in group.layer_names]


def _backends(config: VllmConfig, names: Iterable[str]) -> list[str]:
    from vllm.config import get_layers_from_vllm_config  # noqa: PLC0415
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: PLC0415

    layers = get_layers_from_vllm_config(config, AttentionLayerBase, list(names))
    return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})


def _wait(client: Client, who: str) -> None:
    """A daemon that is not there yet is no reason not to serve; one that refuses what it is told is."""
    try:
        client.wait_ready(START_S)
    except Unavailable as err:
        logger.warning("Headrace: the %s has no node daemon: %s. Requests compute their prompts themselves until it comes", who, err)
    except Refusal as err:
        raise describe.Unfit(f"the node daemon refuses this engine's {who}: {err}") from err


def _log(level: str, text: str) -> None:
    {"info": logger.info, "warning": logger.warning, "error": logger.error}[level]("Headrace: %s", text)
