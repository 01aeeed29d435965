"""A daemon and a scheduler made of randomness, to run the connector's state machines against.

Daemon ends leases whenever it likes, and Engine does with requests what vLLM 0.32's scheduler does: waits, loads, chunks,
preempts, aborts. Engine.free is where the rule is checked that counts: no block comes back while a lease may touch it.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from headrace.events import Bound, Ended, Event, Lease, LeaseRef, Opened, Presented, Refused, Settled, Withdrawn
from headrace.protocol import Code, State
from headrace.vllm.control import Control
from headrace.vllm.groups import Groups
from headrace.vllm.meta import Answer
from headrace.vllm.params import Offer, digest

BLOCK = 4
NULL = 0


def windowed(window: int) -> Any:
    """What vLLM's manager of a group with a sliding window says of so many computed tokens."""
    return lambda computed: max(0, computed - window + 1)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def ticket(n: int) -> bytes:
    return b"HRTK\x01\x00\x60\x01" + n.to_bytes(16, "little") + bytes(328)


def params(role: str, n: int, deadline_ms: int) -> dict[str, Any]:
    text = base64.b64encode(ticket(n)).decode()
    return {"headrace": {"v": 1, "role": role, "ticket": text, "peer": "127.0.0.1:1", "deadline_ms": deadline_ms}}


class Daemon:
    """What Control takes for its client. Whatever a daemon may do at a time, do() does at random."""

    def __init__(self, rng: random.Random, clock: Clock) -> None:
        self.rng, self.clock = rng, clock
        self.ready = True
        self.stopped = False  # the process: it says nothing, and touches what it was told to
        self.epoch = 1
        self.living: dict[bytes, Lease] = {}
        self.record: set[bytes] = set()
        self.revoking: set[bytes] = set()
        self.presented: dict[bytes, Presented] = {}
        self.used: set[bytes] = set()
        self.settled: set[bytes] = set()
        self.events: list[Event] = []
        self.pushed: dict[bytes, set[int]] = {}
        self.ids = 0

    # as headrace.client.Client

    def present(self, ticket: bytes, peer: str, tokens: int, blocks: Sequence[int], meta: bytes = b"") -> Lease:
        assert peer
        assert Offer.decode(meta)
        return self._new(Lease("P", ticket[8:24], ticket, tokens, list(blocks)))

    def extend(self, lease: Lease, blocks: Sequence[int]) -> None:
        lease.blocks.extend(blocks)

    def handoff(self, lease: Lease, record: bytes) -> None:
        assert record
        assert len(lease.blocks) == -(-lease.tokens // BLOCK), "a hand-off while blocks are missing is refused"
        assert lease.nonce not in self.record
        self.record.add(lease.nonce)

    def bind(self, ticket: bytes, first_token: int, blocks: Sequence[int]) -> Lease:
        assert first_token % BLOCK == 0
        self.presented.pop(ticket[8:24], None)
        return self._new(Lease("D", ticket[8:24], ticket, blocks=list(blocks), first_token=first_token))

    def refuse(self, ticket: bytes, reason: str) -> None:
        assert reason
        self.used.add(ticket[8:24])
        self.presented.pop(ticket[8:24], None)

    def revoke(self, lease: Lease, reason: str) -> None:
        assert reason
        if self.living.get(lease.nonce) is lease:
            self.revoking.add(lease.nonce)

    def wait_over(self, lease: Lease, timeout: float) -> bool:
        assert timeout >= 0
        if not lease.over and self.stopped:
            self.clock.now += timeout
            return False
        if not lease.over:
            self._end(lease, Ended(lease, State.REVOKED, "fenced"))
        return True

    def flush(self) -> None:
        return

    def wait_news(self, timeout: float) -> None:
        self.clock.now += timeout

    def step(self) -> Sequence[Event]:
        if self.stopped:
            return []
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.ready = False

    # what happens to it

    def _new(self, lease: Lease) -> Lease:
        assert lease.nonce not in self.living, "a ticket is used once"
        self.living[lease.nonce] = lease
        return lease

    def _ref(self) -> LeaseRef:
        self.ids += 1
        return LeaseRef(self.epoch, self.ids)

    def _end(self, lease: Lease, ev: Event) -> None:
        del self.living[lease.nonce]
        self.revoking.discard(lease.nonce)
        lease.over = True
        self.events.append(ev)

    def offer(self, n: int, tokens: int, meta: bytes) -> None:
        nonce = ticket(n)[8:24]
        if nonce in self.used or nonce in self.living or nonce in self.presented:
            return
        self.used.add(nonce)
        self.presented[nonce] = Presented(nonce, tokens, (), "p", meta, LeaseRef(self.epoch, n))
        self.events.append(self.presented[nonce])

    def withdraw(self) -> None:
        if self.presented:
            nonce = self.rng.choice(sorted(self.presented))
            del self.presented[nonce]
            self.events.append(Withdrawn(nonce, "the prefill is gone"))

    def do(self) -> None:
        """One thing happens to one lease."""
        if not self.living or self.stopped:
            return
        lease = self.living[self.rng.choice(sorted(self.living))]
        if lease.nonce in self.revoking:
            self._end(lease, Ended(lease, State.REVOKED, "revoked"))
            return
        match self.rng.randrange(8):
            case 0 if lease.ref is None:
                self._end(lease, Refused(lease, Code.BAD_TICKET, "no"))
            case 1 if self.rng.random() < 0.3:
                self._end(lease, Ended(lease, State.REVOKED, "the other side is gone"))
            case 2 if lease.ref is not None and lease.role == "P" and not lease.bound and self.rng.random() < 0.3:
                lease.ref = self._ref()  # taken anew by a successor
                self.pushed.pop(lease.nonce, None)
                self.events.append(Opened(lease))
            case _:
                self._onwards(lease)

    def _onwards(self, lease: Lease) -> None:
        if lease.ref is None:
            lease.ref = self._ref()
            lease.bound = lease.role == "D"
            self.events.append(Opened(lease))
        elif lease.role == "P" and not lease.bound:
            lease.bound = True
            self.events.append(Bound(lease, 0))
        elif lease.role == "D" or (lease.nonce in self.record and len(self.pushed.get(lease.nonce, ())) == len(lease.blocks)):
            self.settled.add(lease.nonce)
            self._end(lease, Settled(lease, b"record"))

    def die(self) -> None:
        """The process is gone: everything of it is fenced."""
        for lease in list(self.living.values()):
            self._end(lease, Ended(lease, State.LOST, "gone"))
        for nonce in list(self.presented):
            self.events.append(Withdrawn(nonce, "gone"))
        self.presented.clear()
        self.ready = False

    def expire(self) -> None:
        for lease in list(self.living.values()):
            self._end(lease, Ended(lease, State.EXPIRED, "the deadline passed"))


@dataclass(eq=False)
class Req:
    name: str
    n: int  # of its ticket
    role: str
    prompt: int
    status: str = "waiting"  # remote, running, held, gone
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    loaded: bool = False

    @property
    def blocks(self) -> list[int]:
        return [b for table in self.tables for b in table if b != NULL]


class Engine:
    """vLLM's scheduler, as far as a connector sees it. windows: of each group of layers, None where it keeps all tokens."""

    def __init__(self, rng: random.Random, blocks: int = 64, windows: Sequence[int | None] = (None,)) -> None:
        self.rng = rng
        self.groups = Groups(BLOCK, tuple(windowed(w) if w is not None else None for w in windows), NULL)
        self.clock = Clock()
        self.daemon = Daemon(rng, self.clock)
        self.control = Control(
            self.daemon,
            block_tokens=BLOCK,
            block_bytes=100,
            log=lambda _level, _text: None,
            wait_s=20.0,
            clock=self.clock,
            wall_ms=self.clock.wall_ms,
            sleep=self.clock.sleep,
        )
        self.control.manage(self.groups, self)
        self.refs: dict[int, int] = {}  # of blocks that are not in the pool: the request's, and the connector's
        self.kept: list[int] = []
        self.pool = list(range(1, blocks + 1))
        self.total = blocks
        self.reqs: dict[str, Req] = {}
        self.finished_recving: set[str] = set()
        self.failed: set[str] = set()
        self.deadline_ms = self.clock.wall_ms() + 60_000

    def add(self, role: str, n: int, prompt: int) -> Req:
        req = Req(f"r{len(self.reqs)}-{n}", n, role, prompt)
        self.reqs[req.name] = req
        self.control.added(req.name, params(role, n, self.deadline_ms), lambda: self.prompt(n, prompt))
        return req

    @staticmethod
    def prompt(n: int, tokens: int) -> Offer:
        return Offer(tokens, digest([n] * tokens, []))

    def offer(self, n: int, tokens: int, meta: Offer | None = None) -> None:
        """The prefill's PRESENT comes, as a connector's is made; meta: of another prompt."""
        meta = meta or self.prompt(n, tokens)
        if self.groups.plain:
            self.daemon.offer(n, tokens, meta.encode())
        elif tokens > 1:
            self.daemon.offer(n, self.groups.plan(tokens - 1).lease_tokens, replace(meta, tokens=tokens - 1).encode())

    def allocate(self, req: Req, tokens: int, adopted: int = 0) -> bool:
        """Blocks for so many tokens; adopted: of them, those that come from elsewhere, for a request that has none."""
        self.drop(req)
        tables = req.tables or [[] for _ in self.groups.skipped]
        needs = []
        for table, skipped in zip(tables, self.groups.skipped, strict=True):
            null = skipped(adopted) // BLOCK if skipped is not None and not table else 0
            needs.append((null, max(0, -(-tokens // BLOCK) - len(table) - null)))
        if sum(n for _, n in needs) > len(self.pool):
            return False
        req.tables = tables
        for table, (null, n) in zip(tables, needs, strict=True):
            new = [self.pool.pop() for _ in range(n)]
            self.refs.update(dict.fromkeys(new, 1))
            table.extend([NULL] * null + new)
        return True

    def drop(self, req: Req) -> None:
        """What has fallen out of the windows is another request's from here on."""
        for table, skipped in zip(req.tables, self.groups.skipped, strict=bool(req.tables)):
            if skipped is not None:
                n = min(len(table), skipped(req.computed) // BLOCK)
                self._unref([b for b in table[:n] if b != NULL], f"what fell out of {req.name}'s window")
                table[:n] = [NULL] * n

    def keep(self, blocks: Sequence[int]) -> None:
        for b in blocks:
            self.refs[b] += 1
        self.kept += blocks

    def release(self, blocks: Sequence[int]) -> None:
        for b in blocks:
            self.kept.remove(b)
        self._unref(blocks, "the connector")

    def free(self, req: Req) -> None:
        blocks, req.tables = req.blocks, []
        self._unref(blocks, req.name)

    def _unref(self, blocks: Sequence[int], whose: str) -> None:
        free = []
        for b in blocks:
            self.refs[b] -= 1
            if self.refs[b] == 0:
                del self.refs[b]
                free.append(b)
        self._back(free, whose)

    def _back(self, blocks: list[int], whose: str) -> None:
        late = self.clock.wall_ms() > self.deadline_ms + 2000  # no daemon takes a prefill's bytes any more, whatever a stopped one reads
        for lease in self.daemon.living.values():
            free = lease.role == "P" and late
            assert free or not set(lease.blocks) & set(blocks), f"{whose}'s blocks come back while {lease} lives"
        assert not set(self.pool) & set(blocks), f"{whose}'s blocks come back twice"
        self.pool += blocks

    def gone(self, req: Req) -> None:
        assert req.status != "gone"
        self.free(req)
        req.status = "gone"

    def finish(self, req: Req, aborted: bool) -> None:
        assert req.status in ("waiting", "remote", "running")
        hold = req.status == "remote" and req.name not in self.finished_recving
        self.finished_recving.discard(req.name)
        self.failed.discard(req.name)
        self.drop(req)
        delay, _ = self.control.finished(req.name, aborted)
        req.status = "held"
        if not (delay or hold):
            self.gone(req)

    def abort_one(self) -> None:
        living = [r for r in self.reqs.values() if r.status in ("waiting", "remote", "running")]
        if living:
            self.finish(self.rng.choice(living), True)

    def step(self, preempt: bool = False) -> None:
        preempted = []
        running = [r for r in self.reqs.values() if r.status == "running"]
        if preempt and running and not self.daemon.stopped:  # else the fence is not awaited for longer than five seconds
            victim = self.rng.choice(running)
            victim.status, victim.computed = "waiting", 0
            preempted.append(victim)
        self._schedule()
        scheduled = [r for r in self.reqs.values() if r.status == "running"]
        if preempted:  # vLLM has the blocks back already; nothing is written there before the step goes out
            self.control.preempted([r.name for r in preempted])
            for r in preempted:
                if r.status == "waiting":
                    self.free(r)
        for r in scheduled:
            chunk = min(r.prompt - r.computed, self.rng.randint(1, 2 * BLOCK))
            if not self.allocate(r, r.computed + chunk):
                continue
            r.computed += chunk
            for name in self.control.sends_for([r.name]):
                self.control.sends.advance(name, r.computed, partial(_copy, r.tables))
        step = self.control.step()
        self._work(step.pushes)
        self._output(step.failed)
        for r in [r for r in self.reqs.values() if r.status == "running" and r.computed >= r.prompt]:
            self.finish(r, False)

    def _schedule(self) -> None:
        for r in sorted((r for r in self.reqs.values() if r.status in ("waiting", "remote")), key=lambda r: r.status):
            if r.status == "remote":
                if r.name not in self.finished_recving:
                    continue
                self.finished_recving.discard(r.name)
                if r.name in self.failed:
                    self.failed.discard(r.name)
                    self.free(r)
                    r.computed = 0
                else:
                    assert ticket(r.n)[8:24] in self.daemon.settled, f"{r.name} goes on with KV that has not settled"
                    r.loaded = True
                r.status = "waiting"
            if r.computed == 0 and not r.blocks:
                local = self.rng.choice([0, 0, BLOCK]) if r.prompt > BLOCK else 0
                n = self.control.matched(r.name, local, whole=self.rng.random() < 0.02)
                if n is None:
                    continue
                assert local + n <= self.groups.most(r.prompt, r.prompt) or n == 0
                if not self.allocate(r, local + n if n else min(r.prompt, local + BLOCK), local + n):
                    continue
                self.control.allocated(r.name, n, _copy(r.tables), r.prompt, partial(self.prompt, r.n, r.prompt))
                if n:
                    r.status, r.computed = "remote", local + n
                    continue
                r.computed = local
            else:
                self.control.allocated(r.name, 0, _copy(r.tables), r.prompt, partial(self.prompt, r.n, r.prompt))
                r.computed = min(r.computed, r.prompt - 1)
            r.status = "running"

    def _work(self, pushes: Sequence[Any]) -> None:
        for p in pushes:
            lease = next((x for x in self.daemon.living.values() if x.ref == p.ref), None)
            if lease is None:
                continue  # over meanwhile: the daemon refuses it
            owner = next(r for r in self.reqs.values() if r.role == "prefill" and ticket(r.n)[8:24] == lease.nonce and r.blocks)
            assert p.first + p.count <= len(lease.blocks), "a push beyond the declared blocks is refused"
            for block in lease.blocks[p.first : p.first + p.count]:
                places = [i for table in owner.tables for i, b in enumerate(table) if b == block]
                if owner.status == "held" and not places:  # it fell out of the window with the last token
                    assert block in self.kept, f"{block} was pushed, and is another request's"
                else:
                    assert min((places[0] + 1) * BLOCK, owner.prompt) <= owner.computed, f"{block} was pushed, and is still written"
            seen = self.daemon.pushed.setdefault(lease.nonce, set())
            new = set(range(p.first, p.first + p.count))
            assert not seen & new, "pushed twice"
            seen |= new

    def _output(self, failed: Sequence[str]) -> None:
        for name in failed:
            if self.reqs[name].status == "remote":
                self.failed.add(name)
        answer = Answer() if self.rng.random() < 0.5 else None
        living = [x for x in self.daemon.living.values() if x.ref is not None and x.role == "P"]
        if living and self.rng.random() < 0.05:
            ref = self.rng.choice(living).ref
            assert ref is not None
            answer = Answer(refused=[(ref, "no such unit")])
        sent, received = self.control.answered(answer, failed)
        for name in received | set(failed):
            r = self.reqs[name]
            if r.status == "remote":
                self.finished_recving.add(name)
            else:
                assert r.status == "held", f"{name} finished its load while {r.status}"
                self.gone(r)
        for name in sent:
            assert self.reqs[name].status == "held"
            self.gone(self.reqs[name])


def _copy(tables: list[list[int]]) -> list[list[int]]:
    return [list(table) for table in tables]
