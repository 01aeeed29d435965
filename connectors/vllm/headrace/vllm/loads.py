"""A decode's side of the scheduler's half: wait for P's offer, bind it to blocks, say when the KV is there or will not come.

    waiting --offer fits--> offered --vLLM gave blocks--> bound --settled--> loaded
       └───────────┴── alone (the engine computes the prompt itself)  └── lost --fenced, reported--> alone

Blocks that were bound belong to the daemon until the lease is over: neither an abort nor a failure gives them back before.
A request that is told to wait is told so until a bound of time, and never longer than its ticket lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeVar

from headrace.events import Ended, Lease, Presented, Refused, Settled, Withdrawn
from headrace.protocol import State
from headrace.vllm.groups import Groups, Plan, Table
from headrace.vllm.meta import Keeper
from headrace.vllm.params import Ask, BadParams, Offer
from headrace.vllm.tally import Tally

ABSENT_S_MAX = 1.0  # how long a request waits for a daemon that is not there
AGAIN_S_MAX = 3.0  # and for its prefill from when a daemon took the place of one that was lost: what that one knew of is gone
DEADLINE_GRACE_S = 2.0  # behind a ticket's deadline, by when its daemon has said so if it can say anything
KEPT_OFFERS_MAX = 4096  # offers, and withdrawals, of tickets whose request has not come: the oldest is dropped first

T = TypeVar("T")


class LoadClient(Protocol):
    """What Loads wants of headrace.client.Client."""

    @property
    def ready(self) -> bool: ...
    def bind(self, ticket: bytes, first_token: int, blocks: Sequence[int]) -> Lease: ...
    def refuse(self, ticket: bytes, reason: str) -> None: ...
    def revoke(self, lease: Lease, reason: str) -> None: ...


class Phase(Enum):
    WAITING = auto()
    OFFERED = auto()
    BOUND = auto()
    LOADED = auto()
    LOST = auto()  # fenced; the workers have not yet reported it
    ALONE = auto()


@dataclass(eq=False, slots=True)
class Load:
    req: str
    ask: Ask
    prompt: Offer  # what P's offer must say
    owner: bool  # the first request with this ticket; the others wait for its blocks
    arrived: float
    phase: Phase = Phase.WAITING
    why: str = ""
    absent_since: float | None = None
    again_since: float | None = None  # another daemon is there than when the request came
    local: int = 0  # tokens vLLM has already, when it was last asked
    plan: Plan | None = None  # of the tokens that P offers
    blocks: tuple[int, ...] = ()
    lease: Lease | None = None
    reported: bool = False  # vLLM was told that the load is finished, well or not
    resumed: bool = False  # and has taken it up again: its blocks are in the prefix cache, if it has one
    finished: bool = False  # vLLM has finished the request while the daemon had the blocks


class Loads:
    def __init__(
        self,
        client: LoadClient,
        groups: Groups,
        clock: Callable[[], float],
        wall_ms: Callable[[], int],
        tally: Tally,
        wait_s: float,
        note: Callable[[str], None],
    ) -> None:
        self._client, self._clock, self._wall_ms, self._tally = client, clock, wall_ms, tally
        self._wait_s, self._note = wait_s, note
        self.groups = groups
        self._loads: dict[str, Load] = {}
        self._owners: dict[bytes, Load] = {}
        self._offers: OrderedDict[bytes, Presented] = OrderedDict()
        self._withdrawn: OrderedDict[bytes, str] = OrderedDict()
        self._done: set[str] = set()
        self._lost: set[str] = set()
        self._kept: dict[Lease, tuple[int, ...]] = {}  # given up while a daemon that says nothing may still write there
        self.keeper: Keeper | None = None

    # what vLLM does with a request

    def begin(self, req: str, ask: Ask, prompt: Offer) -> None:
        if req in self._loads:
            return
        owner = ask.nonce not in self._owners
        ld = self._loads[req] = Load(req, ask, prompt, owner, self._clock())
        if owner:
            self._owners[ask.nonce] = ld

    def matched(self, req: str, local: int, whole: bool) -> int | None:
        """Tokens behind the first local ones that will be loaded; None: ask again. whole: vLLM computes the prompt itself in any case."""
        ld = self._loads.get(req)
        if ld is None or ld.phase not in (Phase.WAITING, Phase.OFFERED):
            return 0
        ld.local = local
        if not ld.owner:
            return self._follow(ld)
        if whole:
            return self._alone(ld, "the request asks for all of the prompt's logprobs")
        if local >= ld.prompt.prompt_tokens - 1:
            return self._alone(ld, "the prompt is in the prefix cache")
        withdrawn = self._withdrawn.pop(ld.ask.nonce, None)
        if withdrawn is not None:
            return self._alone(ld, withdrawn, "ended", told=True)
        offer = self._offers.get(ld.ask.nonce)
        if offer is None:
            return self._wait(ld)
        try:
            meta = Offer.decode(offer.meta)
        except BadParams as err:
            return self._alone(ld, str(err), "prompt_differs")
        plan = self._plan(meta, offer.tokens, ld.prompt)
        if plan is None:
            why = f"the prefill computed another prompt ({meta.prompt_tokens} tokens, this request has {ld.prompt.prompt_tokens})"
            return self._alone(ld, why, "prompt_differs")
        if plan.tokens <= local:
            return self._alone(ld, "what the prefill has is in the prefix cache")
        ld.phase, ld.plan = Phase.OFFERED, plan
        return plan.tokens - local

    def _plan(self, meta: Offer, lease_tokens: int, prompt: Offer) -> Plan | None:
        """What P offers, None where that is not of this prompt."""
        if (meta.prompt_tokens, meta.digest) != (prompt.prompt_tokens, prompt.digest) or (meta.tokens is None) != self.groups.plain:
            return None
        tokens = lease_tokens if meta.tokens is None else meta.tokens
        if not 0 < tokens <= self.groups.most(prompt.prompt_tokens, prompt.prompt_tokens):
            return None
        plan = self.groups.plan(tokens)
        return plan if plan.lease_tokens == lease_tokens else None

    def allocated(self, req: str, external: int, tables: Sequence[Table]) -> None:
        """vLLM gave the request blocks, external tokens of which are to be loaded into."""
        ld = self._loads.get(req)
        if ld is None:
            return
        if external == 0:
            if ld.phase in (Phase.WAITING, Phase.OFFERED):
                self._alone(ld, "vLLM wants nothing loaded")
            ld.resumed = True
            return
        if ld.phase is not Phase.OFFERED or ld.plan is None:
            raise AssertionError(f"vLLM loads {external} tokens of {req}, which is {ld.phase.name}")
        ld.phase = Phase.BOUND
        self._offers.pop(ld.ask.nonce, None)
        block_tokens = self.groups.block_tokens
        try:
            ld.blocks = tuple(ld.plan.pick(tables, 0, ld.plan.blocks))
            ld.lease = self._client.bind(ld.ask.ticket, ld.plan.below(ld.local // block_tokens) * block_tokens, ld.blocks)
        except ValueError as err:  # Dropped, more blocks than a lease holds, or a ticket that is in use
            self._client.refuse(ld.ask.ticket, str(err))
            self._lose(ld, str(err), "refused")

    def finished(self, req: str) -> bool:
        """The request has finished. True: its blocks must stay until take_done, or the workers' report of lost, names it."""
        ld = self._loads.get(req)
        if ld is None:
            return False
        if ld.phase in (Phase.WAITING, Phase.OFFERED):
            self._alone(ld, "the client left", told=not ld.owner)
        if ld.phase is Phase.BOUND and ld.lease is not None:
            self._client.revoke(ld.lease, "the client left")
        elif ld.phase is not Phase.LOST and (ld.phase is not Phase.LOADED or ld.reported):
            self._forget(ld)
            return False
        ld.finished = True
        return True

    # what the daemon and the workers say

    def event(self, ev: Presented | Withdrawn | Settled | Ended | Refused) -> None:
        if isinstance(ev, Presented):
            ld = self._owners.get(ev.nonce)
            if ld is None or ld.phase is Phase.WAITING:
                _keep(self._offers, ev.nonce, ev)
            return
        if isinstance(ev, Withdrawn):
            self._offers.pop(ev.nonce, None)
            ld = self._owners.get(ev.nonce)
            if ld is None:
                _keep(self._withdrawn, ev.nonce, ev.text)
            elif ld.phase in (Phase.WAITING, Phase.OFFERED):
                self._alone(ld, ev.text or "the prefill withdrew it", "ended", told=True)
            return
        kept = self._kept.pop(ev.lease, None)
        if kept is not None and self.keeper is not None:
            self.keeper.release(kept)
        ld = self._owners.get(ev.lease.nonce)
        if ld is None or ld.lease is not ev.lease or ld.phase is not Phase.BOUND:
            return
        if isinstance(ev, Settled):
            ld.phase = Phase.LOADED
            self._tally.received(len(ld.blocks), self._clock() - ld.arrived)
            self._done.add(ld.req)
        elif isinstance(ev, Refused):
            self._lose(ld, ev.text or "refused", "refused" if ev.code is not None else "no_daemon")
        else:
            self._lose(ld, ev.text or "ended", {State.EXPIRED: "expired", State.LOST: "daemon_lost"}.get(ev.state, "ended"))

    def reattached(self) -> None:
        """A daemon is there again, behind one that was lost. Its engine's requests may wait for what the lost one had been given."""
        now = self._clock()
        for ld in self._loads.values():
            if ld.phase is Phase.WAITING and ld.again_since is None:
                ld.again_since = now

    def reported(self, reqs: Sequence[str]) -> None:
        """The workers have told vLLM that these loads are finished, which is how it hears of a failed one."""
        for req in reqs:
            self._lost.discard(req)
            ld = self._loads.get(req)
            if ld is not None and ld.phase is Phase.LOST:
                ld.phase, ld.reported = Phase.ALONE, True
                if ld.finished:
                    self._forget(ld)

    # once a step

    def take_done(self) -> set[str]:
        """Requests whose KV is there, or whose blocks are fenced after an abort: each is named once."""
        done, self._done = self._done, set()
        for req in done:
            ld = self._loads[req]
            ld.reported = True
            if ld.finished:
                self._forget(ld)
        return done

    def take_lost(self) -> list[str]:
        """Requests whose load failed, for the workers to report: each is named once."""
        self._expire()
        lost, self._lost = sorted(self._lost), set()
        return lost

    @property
    def busy(self) -> bool:
        """Whether anything of the daemon's is awaited for a request that vLLM holds."""
        return any(ld.phase in (Phase.BOUND, Phase.LOST) or (ld.phase is Phase.LOADED and not ld.reported) for ld in self._loads.values())

    @property
    def waiting(self) -> bool:
        """Whether the daemon's next word is what a request waits for."""
        return not self._done and any(ld.phase in (Phase.WAITING, Phase.BOUND) for ld in self._loads.values())

    def __len__(self) -> int:
        return len(self._loads)

    # inside

    def _expire(self) -> None:
        """A daemon that is stopped says nothing, and may go on some day: the request goes on now, its blocks only then."""
        now = self._wall_ms()
        for ld in self._loads.values():
            if ld.phase is Phase.BOUND and now > ld.ask.deadline_ms + DEADLINE_GRACE_S * 1000 and self.keeper is not None and ld.lease:
                self.keeper.keep(ld.blocks)
                self._kept[ld.lease] = ld.blocks
                self._lose(ld, "the ticket's deadline passed, and the node daemon says nothing: look whether it is stopped", "expired")

    def _wait(self, ld: Load) -> int | None:
        now = self._clock()
        if self._client.ready:
            ld.absent_since = None
        elif ld.absent_since is None:
            ld.absent_since = now
        elif now - ld.absent_since > ABSENT_S_MAX:
            return self._alone(ld, "the node daemon is not there", "no_daemon")
        if self._wall_ms() >= ld.ask.deadline_ms:
            return self._alone(ld, "the prefill did not come before the ticket's deadline", "not_presented")
        if now - ld.arrived > self._wait_s:
            return self._alone(ld, f"the prefill did not come within {self._wait_s:g} s", "not_presented")
        if ld.again_since is not None and now - ld.again_since > min(AGAIN_S_MAX, self._wait_s):
            why = f"the node daemon was lost, and the prefill did not come to the next one within {AGAIN_S_MAX:g} s"
            return self._alone(ld, why, "not_presented")
        return None

    def _follow(self, ld: Load) -> int | None:
        """Another request with the same ticket: when the owner's blocks are loaded they are found in the prefix cache."""
        first = self._owners.get(ld.ask.nonce)
        late = self._clock() - ld.arrived > self._wait_s or self._wall_ms() >= ld.ask.deadline_ms
        if late or first is None or first.resumed or first.phase is Phase.ALONE:
            ld.phase, ld.why = Phase.ALONE, "the ticket is another request's"
            return 0
        return None

    def _alone(self, ld: Load, why: str, failure: str = "", *, told: bool = False) -> int:
        """The engine computes the prompt itself. told: P's side knows already."""
        ld.phase, ld.why = Phase.ALONE, why
        if ld.owner:
            self._offers.pop(ld.ask.nonce, None)
            if not told:
                self._client.refuse(ld.ask.ticket, why)
        if failure:
            self._tally.fail(failure)
            self._note(f"request {ld.req} computes its prompt itself: {why}")
        return 0

    def _lose(self, ld: Load, why: str, failure: str) -> None:
        if ld.finished:
            ld.phase, ld.why = Phase.LOADED, why  # nobody wants the KV any more; the blocks are fenced
            self._done.add(ld.req)
            return
        ld.phase, ld.why = Phase.LOST, why
        self._lost.add(ld.req)
        self._tally.fail(failure)
        self._note(f"request {ld.req} computes its prompt itself, the KV of its prefill did not arrive: {why}")

    def _forget(self, ld: Load) -> None:
        self._loads.pop(ld.req, None)
        if self._owners.get(ld.ask.nonce) is ld:
            del self._owners[ld.ask.nonce]


def _keep(store: OrderedDict[bytes, T], key: bytes, value: T) -> None:
    store[key] = value
    if len(store) > KEPT_OFFERS_MAX:
        store.popitem(last=False)
