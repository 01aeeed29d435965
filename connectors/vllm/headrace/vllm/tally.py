"""Counts of transfers, as plain numbers that travel from the scheduler to vLLM's metrics."""

from __future__ import annotations

from typing import Any

REASONS = (
    "not_presented",  # D: P never came, until the deadline
    "prompt_differs",  # D: P's KV is of another prompt
    "refused",  # a daemon, or the other engine, said no
    "ended",  # revoked by the other side, or a failure on the way
    "expired",  # the ticket's deadline passed
    "daemon_lost",  # the daemon's process is gone
    "no_daemon",  # there was none to begin with
    "push_refused",  # P: a push was not taken
    "preempted",  # P: vLLM took the blocks
    "params",  # kv_transfer_params not understood
)


class Tally:
    """What happened since it was last taken."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._data = empty()
        self.totals = {"sent": 0, "received": 0, "failed": 0}

    def sent(self, blocks: int, seconds: float) -> None:
        self._data["sent_seconds"].append(seconds)
        self._data["sent_bytes"].append(blocks * self._block_bytes)
        self.totals["sent"] += 1

    def received(self, blocks: int, seconds: float) -> None:
        self._data["wait_seconds"].append(seconds)
        self._data["received_bytes"].append(blocks * self._block_bytes)
        self.totals["received"] += 1

    def fail(self, reason: str) -> None:
        counts = self._data["failures"]
        counts[reason] = counts.get(reason, 0) + 1
        self.totals["failed"] += 1

    def take(self) -> dict[str, Any] | None:
        if self._data == empty():
            return None
        data, self._data = self._data, empty()
        return data


def empty() -> dict[str, Any]:
    return {"sent_seconds": [], "sent_bytes": [], "wait_seconds": [], "received_bytes": [], "failures": {}}


def join(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Both together, in a."""
    for key, value in b.items():
        if key == "failures":
            for reason, n in value.items():
                a[key][reason] = a[key].get(reason, 0) + n
        else:
            a[key].extend(value)
    return a
