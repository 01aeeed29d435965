"""The connector's counts as vLLM's own log and metrics show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from headrace.vllm import tally

SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
BYTES = [float(1 << n) for n in range(14, 38, 2)]  # 16 KiB to 64 GiB


@dataclass
class HeadraceStats(KVConnectorStats):
    """One interval's transfers. data is tally's."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = tally.empty()

    def is_empty(self) -> bool:
        return self.data == tally.empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        tally.join(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        d = self.data
        waits = sorted(d["wait_seconds"])
        return {
            "Sent": len(d["sent_bytes"]),
            "Sent MB": round(sum(d["sent_bytes"]) / 1e6, 1),
            "Received": len(d["received_bytes"]),
            "Received MB": round(sum(d["received_bytes"]) / 1e6, 1),
            "Median wait for KV (ms)": round(waits[len(waits) // 2] * 1e3, 1) if waits else 0.0,
            "Longest wait for KV (ms)": round(waits[-1] * 1e3, 1) if waits else 0.0,
            "Failed": sum(d["failures"].values()),
        }


class HeadracePromMetrics(KVConnectorPromMetrics):
    """vllm:headrace_*: what the connector did, as this engine saw it. The daemon counts what went over the wires."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            key: self._histogram(f"vllm:headrace_{name}", text, buckets)
            for key, name, text, buckets in (
                ("wait_seconds", "kv_wait_seconds", "From a decode request's arrival until its prompt's KV had settled.", SECONDS),
                ("received_bytes", "received_bytes", "KV that was written into a decode request's blocks.", BYTES),
                ("sent_seconds", "send_seconds", "From a prefill request's first step until its KV had settled at the decode.", SECONDS),
                ("sent_bytes", "sent_bytes", "KV of a prefill request's blocks.", BYTES),
            )
        }
        self._failures = self._counter_cls(
            name="vllm:headrace_failed_transfers",
            documentation="Transfers that came to nothing, by reason; the decode computed the prompt itself.",
            labelnames=[*labelnames, "reason"],
        )
        for values in per_engine_labelvalues.values():
            for reason in tally.REASONS:  # shown from the start, so that rates begin at 0
                self._failures.labels(*values, reason)

    def _histogram(self, name: str, text: str, buckets: list[float]) -> Any:
        h = self._histogram_cls(name=name, documentation=text, buckets=buckets, labelnames=self._labelnames)
        return create_metric_per_engine(h, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, per_engine in self._histograms.items():
            for value in transfer_stats_data[key]:
                per_engine[engine_idx].observe(value)
        for reason, n in transfer_stats_data["failures"].items():
            self._failures.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(n)
