"""The KV connector of vLLM: kv_connector "HeadraceConnector", kv_connector_module_path "headrace.vllm".

connector  what vLLM calls; the only module here, with stats and describe, that imports vLLM
control    the scheduler's half: tickets, leases and when a request's blocks may be used again
sends      a prefill's side of control
loads      a decode's side of control
groups     which blocks a lease lists where the model's layers are of several kinds
worker     a rank's half: lends the KV cache and pushes what a step has finished
params     kv_transfer_params, and what both sides must agree on of a prompt
meta       what goes from control to the workers each step, and back

Nothing but connector, stats and describe may import vLLM or torch: the state machines are tested without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.vllm.connector import HeadraceConnector

__all__ = ["HeadraceConnector"]


def __getattr__(name: str) -> object:
    if name == "HeadraceConnector":  # late, so that the state machines import without vLLM
        from headrace.vllm.connector import HeadraceConnector  # noqa: PLC0415

        return HeadraceConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
