"""A rank's half: pushes what a step's forward pass has finished, and answers the scheduler's half.

Nothing is pushed before the forward pass is through with it. On a CPU a layer's call is synchronous, so that its blocks may
go while the next layer computes; on a GPU a gate (an event recorded behind the forward pass) says when the step is done, and
what waits behind gates goes out in order, with a later step if need be. Steps that skip save_kv_layer (full CUDA graphs)
push all layers at their end: the end of a step pushes whatever its layers have not.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.events import Connected, Event, LeaseRef, Lost, Pushed, PushRefused
from headrace.protocol import ALL_LAYERS, Code, Unit
from headrace.vllm.meta import Answer, Push, Step

LAYER_BYTES_MIN = 1 << 19  # a layer's share of a step that is pushed by itself: below that the call costs more than the overlap saves
GATES_MAX = 64  # steps whose pushes may wait for the GPU at once
# How long a push is offered again: the daemon may read it before the blocks' declaration, which comes over another socket, and
# the scheduler may have met a new daemon before this rank has.
AGAIN_S = 2.0
SENT_MAX = 4096  # pushes remembered for that


class MemberClient(Protocol):
    """What Member wants of headrace.client.Client."""

    @property
    def ready(self) -> bool: ...
    def step(self) -> Sequence[Event]: ...
    def push(self, ref: LeaseRef, units: Sequence[Unit]) -> int: ...
    def close(self) -> None: ...


class Gate(Protocol):
    """Says when the work queued on the device before it is done."""

    def passed(self) -> bool: ...
    def wait(self) -> None: ...


class Open:
    """The gate of a device whose calls return when they are done."""

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        return


@dataclass(slots=True)
class _Behind:
    gate: Gate
    units: list[tuple[LeaseRef, list[Unit]]] = field(default_factory=list)


@dataclass(slots=True)
class _Sent:
    ref: LeaseRef
    units: list[Unit]
    since: float


class Member:
    def __init__(
        self,
        client: MemberClient,
        *,
        rank: int,
        layers: Sequence[Sequence[str]],  # vLLM's layer names at each layer of the region
        layer_block_bytes: int,
        gate: Callable[[], Gate] | None,  # None: calls are synchronous
        log: Callable[[str, str], None],
        arrive: Callable[[], None] | None = None,  # makes what NICs wrote visible to the device, where that does not come by itself
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._rank, self._gate, self._log = client, rank, gate, log
        self._layers = {name: i for i, names in enumerate(layers) for name in names}
        self._layer_block_bytes, self._arrive, self._clock = layer_block_bytes, arrive, clock
        self._layer_count = len(layers)
        self._alone = all(len(names) == 1 for names in layers)  # else a place is done when its last layer is, whichever that be
        self._step = Step()
        self._by_layer = False
        self._pushed: set[int] = set()  # layers of this step
        self._behind: deque[_Behind] = deque()
        self._sent: OrderedDict[int, _Sent] = OrderedDict()
        self._again: list[_Sent] = []
        self._refused: list[tuple[LeaseRef, str]] = []
        self._absent: str | None = None  # as last told; None: never
        self._lost = False

    # a step, in the order of vLLM's calls

    def begin(self, step: Step) -> None:
        self._step = step
        if step.arrived and self._arrive is not None:
            self._arrive()
        self._pushed.clear()
        blocks = sum(p.count for p in step.pushes)
        self._by_layer = self._alone and self._gate is None and blocks * self._layer_block_bytes >= LAYER_BYTES_MIN

    def layer(self, name: str) -> None:
        """This layer of the step's batch is computed."""
        if not self._by_layer:
            return
        index = self._layers.get(name)
        if index is None or index in self._pushed:
            return
        self._pushed.add(index)
        for p in self._step.pushes:
            self._push(_Sent(p.ref, [Unit(index, p.first, p.count)], self._clock()))

    def end(self) -> None:
        """The forward pass was submitted, and on a CPU is done."""
        step, self._step = self._step, Step()
        if step.pushes:
            units = [(p.ref, self._units(p)) for p in step.pushes]
            units = [(ref, u) for ref, u in units if u]
            if self._gate is None:
                self._submit(units)
            else:
                if len(self._behind) >= GATES_MAX:
                    self._behind[0].gate.wait()
                self._behind.append(_Behind(self._gate(), units))
        self.turn()

    def turn(self) -> None:
        """One batch out, one look at what came."""
        while self._behind and self._behind[0].gate.passed():
            self._submit(self._behind.popleft().units)
        again, self._again = self._again, []
        for sent in again:
            self._push(sent)
        for ev in self._client.step():
            self._event(ev)

    def answer(self, beat: bool) -> Answer | None:
        absent = "" if self._client.ready else "no node daemon has taken it"
        news = absent != self._absent and (absent != "" or self._absent is not None)
        self._absent = absent
        if not (beat or news or self._refused):
            return None
        refused, self._refused = self._refused, []
        return Answer(refused, {self._rank: absent} if news else {})

    def close(self) -> None:
        while self._behind:  # blocks may be overwritten from here on only when nothing reads them: the daemon fences when we close
            self._behind.popleft()
        self._client.close()

    # inside

    def _units(self, p: Push) -> list[Unit]:
        if not self._pushed:
            return [Unit(ALL_LAYERS, p.first, p.count)]
        return [Unit(i, p.first, p.count) for i in range(self._layer_count) if i not in self._pushed]

    def _submit(self, units: list[tuple[LeaseRef, list[Unit]]]) -> None:
        for ref, u in units:
            self._push(_Sent(ref, u, self._clock()))

    def _push(self, sent: _Sent) -> None:
        self._sent[self._client.push(sent.ref, sent.units)] = sent
        if len(self._sent) > SENT_MAX:
            self._sent.popitem(last=False)

    def _event(self, ev: Event) -> None:
        if isinstance(ev, Pushed):
            self._sent.pop(ev.seq, None)
        elif isinstance(ev, PushRefused):
            sent = self._sent.pop(ev.seq, None)
            if ev.code is Code.INVALID and sent is not None and self._clock() - sent.since < AGAIN_S:
                self._again.append(sent)
            elif ev.code not in (Code.UNKNOWN_LEASE, Code.LEASE_ENDED):
                self._refused.append((ev.ref, ev.text or ev.code.name.lower()))
        elif isinstance(ev, Connected):
            self._lost = False
            self._log("info", f"rank {self._rank} lends its KV cache to the node daemon of {ev.node} (epoch {ev.epoch:#x})")
        elif isinstance(ev, Lost) and not self._lost:  # once: the attempts that follow have reasons of their own
            self._lost = True
            self._log("warning", f"rank {self._rank} has no node daemon: {ev.text}")
