"""A prefill's side of the scheduler's half: present a request's blocks, say what to push, hold the blocks until the lease is over.

A request's send goes new -> open -> over. It is over exactly once, and its blocks are given back only after that: while a
lease lives the daemon may read them at any time. What is pushed is what the step's own forward pass has finished, so a
block that a later step writes again (preemption) is never pushed from: the lease is revoked, and its fence waited for,
before the step that could write there is sent to the workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headrace.events import Bound, Ended, Lease, LeaseRef, Opened, Refused, Settled
from headrace.protocol import State
from headrace.vllm.groups import Dropped, Groups, Plan, Table
from headrace.vllm.meta import Keeper, Push
from headrace.vllm.params import VERSION, Ask, Offer
from headrace.vllm.tally import Tally

FENCE_S_MAX = 5.0  # a fence takes 20 ms; a daemon silent for longer has lost its peers as well (2.5 s)
DEADLINE_GRACE_S = 2.0  # behind a ticket's deadline, when D's daemon has certainly given the lease up


class SendClient(Protocol):
    """What Sends wants of headrace.client.Client."""

    def present(self, ticket: bytes, peer: str, tokens: int, blocks: Sequence[int], meta: bytes = b"") -> Lease: ...
    def extend(self, lease: Lease, blocks: Sequence[int]) -> None: ...
    def handoff(self, lease: Lease, record: bytes) -> None: ...
    def revoke(self, lease: Lease, reason: str) -> None: ...
    def wait_over(self, lease: Lease, timeout: float) -> bool: ...


@dataclass(eq=False, slots=True)
class Send:
    req: str
    ask: Ask
    plan: Plan  # of the tokens that travel
    offer: Offer
    since: float  # when it was first scheduled
    blocks: list[int] = field(default_factory=list)  # the plan's, as far as they are allocated
    seen: int = 0  # blocks of vLLM's tables that those come from
    kept: list[int] = field(default_factory=list)  # of them, those that vLLM would drop when the request goes on
    declared: int = 0  # of them, to the daemon
    complete: int = 0  # blocks that the steps scheduled so far finish
    lease: Lease | None = None
    ref: LeaseRef | None = None  # that the pushes below went to
    pushed: int = 0
    handed: bool = False
    revoked: bool = False
    held: bool = False  # the request has finished; vLLM keeps its blocks until told
    why: str = ""  # it was revoked
    over: str | None = None  # why; "" when it settled


class Sends:
    def __init__(
        self,
        client: SendClient,
        groups: Groups,
        clock: Callable[[], float],
        wall_ms: Callable[[], int],
        tally: Tally,
        note: Callable[[str], None],
    ) -> None:
        self._client, self._clock, self._wall_ms, self._tally = client, clock, wall_ms, tally
        self._note = note
        self.groups = groups
        self.keeper: Keeper | None = None
        self._sends: dict[str, Send] = {}
        self._by_nonce: dict[bytes, Send] = {}
        self._done: set[str] = set()

    # what vLLM does with a request

    def begin(self, req: str, ask: Ask, tokens: int, offer: Offer, tables: Sequence[Table]) -> None:
        """The request is scheduled for the first time; tables have the blocks allocated so far."""
        if req in self._sends or ask.nonce in self._by_nonce:
            return  # again after a preemption, or another request with the same ticket: a ticket is used once
        tokens = self.groups.most(tokens, offer.prompt_tokens)
        if not self.groups.plain:
            offer = replace(offer, tokens=tokens)
        s = Send(req, ask, self.groups.plan(tokens), offer, self._clock())
        self._sends[req] = self._by_nonce[ask.nonce] = s
        if tokens == 0:
            self._end(s, "nothing of the prompt fills a block")
            return
        if self._wall_ms() >= ask.deadline_ms:
            self._end(s, "the ticket's deadline passed before the prefill began", "expired")
            return
        if self._see(s, tables):
            self._present(s)

    def advance(self, req: str, computed: int, tables: Callable[[], Sequence[Table]]) -> None:
        """A step was scheduled behind which so many of the request's tokens are computed."""
        s = self._sends.get(req)
        if s is None or s.over is not None or s.revoked:
            return
        if s.seen < s.plan.blocks and not self._see(s, tables()):
            return
        block_tokens = self.groups.block_tokens
        if computed >= min(s.plan.blocks * block_tokens, s.offer.prompt_tokens):  # from here on nothing is written beside what travels
            s.complete = s.plan.count
        else:
            s.complete = max(s.complete, min(s.plan.below(computed // block_tokens), len(s.blocks)))
        self._declare(s)

    def preempted(self, reqs: Sequence[str]) -> list[str]:
        """vLLM took these requests' blocks. Returns when the daemon reads them no more, and names those of which that is not known."""
        waits = []
        for req in reqs:
            s = self._sends.get(req)
            if s is None or s.over is not None:
                continue
            if not s.revoked:
                self._tally.fail("preempted")
                self._note(f"the KV of request {s.req} is not handed over: vLLM preempted it; its decode computes the prompt itself")
            self._revoke(s, "preempted")
            if s.over is None:
                waits.append(s)
        late = []
        until = self._clock() + FENCE_S_MAX
        for s in waits:
            if s.lease is not None and not s.lease.over and not self._client.wait_over(s.lease, max(0.0, until - self._clock())):
                late.append(s.req)
        return late

    def finished(self, req: str, aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        """The request has finished. True: its blocks must stay until take_done names it."""
        s = self._sends.get(req)
        if s is None:
            return False, None
        if s.over is None and not s.revoked:
            if aborted:
                self._revoke(s, "the client left")
            elif s.complete < s.plan.count:
                self._revoke(s, "the request ended before its prompt was computed")
        if s.over is not None:
            self._forget(s)
            return False, {"headrace": {"v": VERSION, "state": "failed" if s.over else "settled", "reason": s.over}}
        s.held = True
        # What no daemon has taken yet may never be: "handed" is said of a lease that there is
        state = "failed" if s.revoked else "handed" if s.lease is not None and s.lease.ref is not None else "asked"
        return True, {"headrace": {"v": VERSION, "state": state, "reason": s.why}}

    # what the daemon and the workers say

    def event(self, ev: Opened | Bound | Settled | Ended | Refused) -> None:
        s = self._by_nonce.get(ev.lease.nonce)
        if s is None or s.lease is not ev.lease or s.over is not None:
            return
        if isinstance(ev, Settled):
            self._end(s, "")
        elif isinstance(ev, Ended):
            self._end(s, ev.text or "ended", _why(ev.state) if not s.revoked else "")
        elif isinstance(ev, Refused):
            self._end(s, ev.text or "refused", "" if s.revoked else "refused" if ev.code is not None or s.ref is not None else "no_daemon")

    def push_refused(self, ref: LeaseRef, text: str) -> None:
        """A worker could not push something of this lease: D is to compute itself at once."""
        for s in self._sends.values():
            if s.over is None and s.lease is not None and s.lease.ref == ref and not s.revoked:
                self._tally.fail("push_refused")
                self._revoke(s, f"push: {text}")

    # once a step

    def pushes(self) -> list[Push]:
        """What the workers are to push behind the step that is being scheduled."""
        out = []
        for s in list(self._sends.values()):
            self._expire(s)
            if s.over is not None or s.revoked:
                continue
            ref = s.lease.ref if s.lease is not None else None
            if ref is not None:
                if ref != s.ref:  # taken by another daemon than before: everything goes to that one
                    s.ref, s.pushed = ref, 0
                if s.pushed < s.complete:
                    out.append(Push(ref, s.pushed, s.complete - s.pushed))
                    s.pushed = s.complete
        return out

    def opening(self) -> bool:
        """Whether a lease is asked for that the daemon has not yet answered, and something is ready to be pushed to it."""
        return any(
            s.over is None and not s.revoked and s.complete > 0 and s.lease is not None and s.lease.ref is None
            for s in self._sends.values()
        )

    def take_done(self) -> set[str]:
        """Requests whose blocks vLLM may free: each is named once."""
        done, self._done = self._done, set()
        return done

    @property
    def holding(self) -> bool:
        return bool(self._done) or any(s.held for s in self._sends.values())

    @property
    def waiting(self) -> bool:
        """Whether the daemon's next word is what vLLM holds blocks for, and nothing is left to be done for it here."""
        return not self._done and any(
            s.held and s.over is None and s.ref is not None and s.pushed >= s.complete for s in self._sends.values()
        )

    @property
    def settling(self) -> bool:
        """Whether blocks of finished requests come back soon: D has bound them."""
        return any(s.held and s.over is None and s.lease is not None and s.lease.bound for s in self._sends.values())

    def __len__(self) -> int:
        return len(self._sends)

    # inside

    def _see(self, s: Send, tables: Sequence[Table]) -> bool:
        # vLLM's tables may go on behind the prompt (speculation, output tokens): those are nobody's business
        end = min(s.plan.blocks, *map(len, tables))
        try:
            more = s.plan.pick(tables, s.seen, end)
            kept = s.plan.pick(tables, s.seen, end, moving=True)
        except Dropped as err:
            self._tally.fail("refused")
            self._note(f"the KV of request {s.req} is not handed over: {err}")
            self._revoke(s, str(err))
            return False
        if kept and self.keeper is not None:
            # A window moves on with the prompt's last token, and with those behind: its blocks would be another request's while they travel
            self.keeper.keep(kept)
            s.kept += kept
        s.seen = max(s.seen, end)
        s.blocks += more
        return True

    def _present(self, s: Send) -> None:
        try:
            s.lease = self._client.present(s.ask.ticket, s.ask.peer, s.plan.lease_tokens, s.blocks, s.offer.encode())
        except ValueError as err:  # a request that no lease can hold, or a ticket that is in use
            self._end(s, str(err), "refused")
            return
        s.declared = len(s.blocks)
        self._declare(s)

    def _declare(self, s: Send) -> None:
        if s.lease is None or s.revoked:
            return
        if s.declared < len(s.blocks):
            more = s.blocks[s.declared :]
            s.declared = len(s.blocks)
            try:
                self._client.extend(s.lease, more)
            except ValueError as err:
                self._revoke(s, str(err))
                return
        want = s.plan.count
        if not s.handed and s.declared == want and s.complete == want:
            # It may go ahead of the pushes: D's daemon settles when all that is wanted has landed
            self._client.handoff(s.lease, json.dumps({"v": VERSION, "tokens": s.plan.tokens}, separators=(",", ":")).encode())
            s.handed = True

    def _revoke(self, s: Send, reason: str) -> None:
        if s.revoked:
            return
        s.revoked, s.why = True, reason
        if s.lease is None:
            self._end(s, reason)
        else:
            self._client.revoke(s.lease, reason)
            if s.over is None and s.lease.over:
                self._end(s, reason)

    def _expire(self, s: Send) -> None:
        if s.over is None and self._wall_ms() > s.ask.deadline_ms + DEADLINE_GRACE_S * 1000:
            # The daemon should have said so long ago. D's takes nothing of this ticket any more, whatever ours still reads.
            self._end(s, "the ticket's deadline passed, and the node daemon did not say so", "expired")

    def _end(self, s: Send, why: str, failure: str = "") -> None:
        s.over = why
        if s.kept and self.keeper is not None:
            self.keeper.release(s.kept)
            s.kept = []
        if why == "":
            self._tally.sent(s.plan.count, self._clock() - s.since)
        elif failure:
            self._tally.fail(failure)
            self._note(f"the KV of request {s.req} was not handed over: {why}")
        if s.held:
            self._done.add(s.req)
            self._forget(s)

    def _forget(self, s: Send) -> None:
        self._sends.pop(s.req, None)
        self._by_nonce.pop(s.ask.nonce, None)


def _why(state: State) -> str:
    return {State.EXPIRED: "expired", State.LOST: "daemon_lost"}.get(state, "ended")
