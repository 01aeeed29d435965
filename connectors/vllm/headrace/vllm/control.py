"""The scheduler's half: one connection to the daemon under the engine's id, looked at without waiting whenever vLLM calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from headrace.events import Bound, Connected, Draining, Ended, Event, Lost, Opened, Presented, Refused, Settled, Withdrawn
from headrace.vllm.groups import Groups, Table
from headrace.vllm.loads import LoadClient, Loads
from headrace.vllm.meta import Answer, Keeper, Step
from headrace.vllm.params import Ask, BadParams, Offer, parse
from headrace.vllm.sends import SendClient, Sends
from headrace.vllm.tally import Tally

OPENING_S_MAX = 0.002  # a lease's id is waited for so long before a step whose blocks it could push: a daemon answers in 0.1 ms
OPENING_S_STEP = 0.0001
ATTACH_S_MAX = 1.0  # how long an idle engine keeps stepping for a daemon that is away: it also delays the engine's own end by that
NEWS_S_MAX = 0.003  # how long a step without work waits for the daemon's news, rather than to step the workers for nothing
WAIT_S = 30.0  # how long a decode waits for its prefill, where the ticket lives longer


class ControlClient(SendClient, LoadClient, Protocol):
    """What Control wants of headrace.client.Client."""

    def step(self) -> Sequence[Event]: ...
    def flush(self) -> None: ...
    def wait_news(self, timeout: float) -> None: ...
    def close(self) -> None: ...


class Control:
    """Turns vLLM's calls and the daemon's events into each other. It knows neither of vLLM's types."""

    def __init__(
        self,
        client: ControlClient,
        *,
        block_tokens: int,
        block_bytes: int,
        log: Callable[[str, str], None],
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._log, self._clock, self._sleep = client, log, clock, sleep
        self.tally = Tally(block_bytes)
        def note(text: str) -> None:
            log("warning", text)

        groups = Groups(block_tokens)
        self.sends = Sends(client, groups, clock, wall_ms, self.tally, note)
        self.loads = Loads(client, groups, clock, wall_ms, self.tally, wait_s, note)
        self._asks: dict[str, Ask] = {}
        self._missing: dict[int, str] = {}  # ranks that lend nothing at present
        self._away_since: float | None = None
        self._lost = False
        self._arrived = False  # KV, since the last step was sent out

    def manage(self, groups: Groups, keeper: Keeper) -> None:
        """What vLLM's cache manager says of the cache, before the first request."""
        self.sends.groups = self.loads.groups = groups
        self.sends.keeper = self.loads.keeper = keeper

    # requests

    def added(self, req: str, params: dict[str, Any] | None, prompt: Callable[[], Offer]) -> None:
        """A request came. prompt is called only where the router asks for something."""
        self._away_since = None
        try:
            ask = parse(params)
        except BadParams as err:
            self.tally.fail("params")
            self._log("warning", f"request {req} goes without a transfer: {err}")
            return
        if ask is None:
            return
        self._asks[req] = ask
        if ask.role == "decode":
            self.loads.begin(req, ask, prompt())

    def matched(self, req: str, local: int, whole: bool) -> int | None:
        self.poll()
        return self.loads.matched(req, local, whole)

    def allocated(self, req: str, external: int, tables: Sequence[Table], tokens: int, prompt: Callable[[], Offer]) -> None:
        """vLLM gave a waiting request blocks: tables, of each group. tokens: so many of its prompt no later step of it writes beside."""
        ask = self._asks.get(req)
        if ask is None:
            return
        if ask.role == "decode":
            self.loads.allocated(req, external, tables)
        else:
            self.sends.begin(req, ask, tokens, prompt(), tables)

    def finished(self, req: str, aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        ask = self._asks.pop(req, None)
        if ask is None:
            return False, None
        if ask.role == "decode":
            return self.loads.finished(req), None
        return self.sends.finished(req, aborted)

    def sends_for(self, reqs: Iterable[str]) -> list[str]:
        """Of these requests, those whose progress is of interest."""
        return [req for req in reqs if (ask := self._asks.get(req)) is not None and ask.role == "prefill"]

    # steps

    def preempted(self, reqs: Sequence[str]) -> None:
        late = self.sends.preempted([req for req in reqs if req in self._asks])
        if late:
            text = f"the node daemon did not stop reading the blocks of preempted requests {', '.join(late)}"
            self._log("error", f"{text}: look at its log, and restart it if it hangs")

    def step(self, *, empty: bool = False) -> Step:
        """What the workers are to do with the step that was scheduled. empty: there is no work in it, and none before it under way."""
        self.poll()
        if empty and (self.loads.waiting or self.sends.waiting):
            self._client.wait_news(NEWS_S_MAX)
            self.poll()
        if self.sends.opening():
            self._wait_opening()
        pushes = self.sends.pushes()
        lost = self.loads.take_lost()
        self._client.flush()  # before the forward pass, not behind it
        arrived, self._arrived = self._arrived, False
        return Step(pushes, lost, arrived, beat=bool(pushes or lost) or self.waiting)

    def answered(self, answer: Answer | None, reported: Iterable[str]) -> tuple[set[str], set[str]]:
        """A step was done: requests whose blocks may be freed (sent), and those whose load is finished (received)."""
        if answer is not None:
            for ref, text in answer.refused:
                self.sends.push_refused(ref, text)
            self._absent(answer.absent)
        self.loads.reported(list(reported))
        self.poll()
        received = self.loads.take_done()
        self._arrived |= bool(received)
        return self.sends.take_done(), received

    @property
    def waiting(self) -> bool:
        """Whether vLLM is to go on stepping for our sake."""
        return self.sends.holding or self.loads.busy or self._away()

    def idle(self) -> bool:
        """As waiting, asked by an engine that has nothing else to do: what came meanwhile is looked at first."""
        self.poll()
        return self.waiting

    def poll(self) -> None:
        for ev in self._client.step():
            self._event(ev)

    def close(self) -> None:
        self._client.close()

    # inside

    def _event(self, ev: Event) -> None:
        if isinstance(ev, Presented | Withdrawn):
            self.loads.event(ev)
        elif isinstance(ev, Settled | Ended | Refused):
            (self.sends if ev.lease.role == "P" else self.loads).event(ev)
        elif isinstance(ev, Opened | Bound):
            if ev.lease.role == "P":
                self.sends.event(ev)
        elif isinstance(ev, Connected):
            if self._lost:
                self.loads.reattached()
            self._away_since, self._lost = None, False
            self._log("info", f"attached to the node daemon of {ev.node} (data address {ev.address or 'none'}, epoch {ev.epoch:#x})")
        elif isinstance(ev, Draining):
            self._log("info", "the node daemon gives way to its successor: new transfers go there, running ones end here")
        elif isinstance(ev, Lost) and not self._lost:  # once: the attempts that follow have reasons of their own
            self._lost = True
            self._log("warning", f"no node daemon: {ev.text}; requests compute their prompts themselves meanwhile")

    def _wait_opening(self) -> None:
        until = self._clock() + OPENING_S_MAX
        while self.sends.opening() and self._client.ready and self._clock() < until:
            self._sleep(OPENING_S_STEP)
            self.poll()

    def _absent(self, absent: dict[int, str]) -> None:
        for rank, text in absent.items():
            if text and self._missing.get(rank) != text and not self._lost:
                self._log("warning", f"rank {rank} lends no memory: {text}")
            if text:
                self._missing[rank] = text
            else:
                self._missing.pop(rank, None)

    def _away(self) -> bool:
        if self._client.ready and not self._missing:
            self._away_since = None
            return False
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        return now - self._away_since < ATTACH_S_MAX
