"""An engine of several processes: a control without regions, and a member for each rank."""

from __future__ import annotations

import json
import mmap
import os
import struct
import urllib.request
from collections.abc import Iterator
from itertools import count

import pytest

from headrace import osys
from headrace.client import Client
from headrace.events import Bound, Connected, Draining, Ended, Lease, Opened, Presented, Pushed, PushRefused, Refused, Settled
from headrace.protocol import ALL_LAYERS, Code, Unit
from tests.nodes import BLOCK_TOKENS, HEAD_BYTES, Node, Steps, ticket

BLOCK = BLOCK_TOKENS * HEAD_BYTES
SEED = count(1)


class Rank:
    """One rank's cache: two layers of eight blocks with one head."""

    def __init__(self, node: Node, engine: str, rank: int, ranks: int) -> None:
        self.size = 2 * 8 * BLOCK
        self.fd = osys.memfd("rank", self.size)
        self.bytes = mmap.mmap(self.fd, self.size)
        head = struct.pack("<BBH11I", 1, 1, 0, 2, 8, BLOCK_TOKENS, 1, 1, rank, ranks, HEAD_BYTES, rank, ranks, 0)
        self.layout = head + struct.pack("<6Q", 0, 8 * BLOCK, BLOCK, BLOCK, HEAD_BYTES, HEAD_BYTES) + bytes(32)
        self.client = Client(node.socket, f"{engine}/{rank}", join=engine)

    def lend(self) -> None:
        self.client.lend(self.fd, self.size, self.layout)

    def fill(self, block: int) -> list[bytes]:
        out = []
        for layer in range(2):
            at = (layer * 8 + block) * BLOCK
            self.bytes[at : at + BLOCK] = bytes([next(SEED) % 255 + 1]) * BLOCK
            out.append(self.bytes[at : at + BLOCK])
        return out

    def block(self, block: int) -> list[bytes]:
        return [self.bytes[(layer * 8 + block) * BLOCK : (layer * 8 + block + 1) * BLOCK] for layer in range(2)]


class Engine:
    def __init__(self, node: Node, name: str, ranks: int = 2) -> None:
        self.control = Client(node.socket, name, about={"engine": "vllm", "blocks": 8}, ring=False)
        self.ranks = [Rank(node, name, i, ranks) for i in range(ranks)]

    def clients(self) -> list[Client]:
        return [self.control, *(r.client for r in self.ranks)]

    def start(self) -> None:
        self.control.wait_ready()
        for r in self.ranks:
            r.lend()
            r.client.wait_ready()

    def close(self) -> None:
        for c in self.clients():
            c.close()
        for r in self.ranks:
            r.bytes.close()
            os.close(r.fd)


@pytest.fixture
def engines(nodes: tuple[Node, Node]) -> Iterator[tuple[Engine, Engine, Steps]]:
    p, d = Engine(nodes[0], "p"), Engine(nodes[1], "d")
    yield p, d, Steps(p.clients() + d.clients())
    p.close()
    d.close()


def transfer(p: Engine, d: Engine, s: Steps, tk: bytes) -> None:
    want = [[r.fill(b) for b in (1, 2)] for r in p.ranks]
    lease = p.control.present(tk, d.control.address, 32, [1, 2])
    s.until(lambda: [e for e in s.of(d.control, Presented) if e.nonce == lease.nonce])
    d.control.bind(tk, 0, [5, 6])
    s.until(lambda: lease.ref is not None)
    assert lease.ref is not None
    for r in p.ranks:
        r.client.push(lease.ref, [Unit(ALL_LAYERS, 0, 2)])
    p.control.handoff(lease, b"r")
    s.until(lambda: [e for e in s.of(d.control, Settled) if e.lease.nonce == lease.nonce])
    s.until(lambda: lease.over)
    assert [[r.block(b) for b in (5, 6)] for r in d.ranks] == want


def about(node: Node) -> list[dict[str, object]]:
    with urllib.request.urlopen(f"{node.said['url']}/status", timeout=10) as answer:
        engines: list[dict[str, object]] = json.load(answer)["engines"]
    return engines


def test_two_ranks(engines: tuple[Engine, Engine, Steps], nodes: tuple[Node, Node]) -> None:
    p, d, s = engines
    p.start()
    d.start()
    transfer(p, d, s, ticket(*nodes))
    for r in p.ranks:
        assert len(s.of(r.client, Pushed)) == 1
    assert {"engine": "vllm", "blocks": 8} in [e.get("about") for e in about(nodes[0])]
    p.control.describe({"engine": "vllm", "blocks": 9})
    p.control.wait_ready()
    s.until(lambda: {"engine": "vllm", "blocks": 9} in [e.get("about") for e in about(nodes[0])])


def test_presented_and_bound_before_all_ranks_are_there(engines: tuple[Engine, Engine, Steps], nodes: tuple[Node, Node]) -> None:
    """Ranks come when they come: a lease waits for them, and no request fails for it."""
    p, d, s = engines
    tk = ticket(*nodes)
    p.control.wait_ready()
    d.control.wait_ready()
    lease = p.control.present(tk, d.control.address, 32, [1, 2])
    p.ranks[0].lend()
    s.until(lambda: p.ranks[0].client.ready)
    assert lease.ref is None
    assert not s.of(p.control, Refused)
    p.ranks[1].lend()
    s.one(p.control, Opened)
    s.one(d.control, Presented)
    bound = d.control.bind(tk, 0, [5, 6])
    s.once()
    assert bound.ref is None
    for r in d.ranks:
        r.lend()
    s.one(p.control, Bound)
    assert lease.ref is not None
    for r in p.ranks:
        r.client.push(lease.ref, [Unit(ALL_LAYERS, 0, 2)])
    p.control.handoff(lease, b"")
    s.one(d.control, Settled)


def test_a_rank_that_never_comes(nodes: tuple[Node, Node]) -> None:
    control = Client(nodes[0].socket, "p", ring=False, patience=0.2)
    control.wait_ready()
    s = Steps([control])
    control.present(ticket(*nodes), "", 16, [1])
    assert s.one(control, Refused).code is Code.RANKS_MISSING
    control.close()


def test_a_member_goes(engines: tuple[Engine, Engine, Steps], nodes: tuple[Node, Node]) -> None:
    """A rank's process ends: its leases end, on both sides, and the control hears of it."""
    p, d, s = engines
    p.start()
    d.start()
    lease, _ = bound(p, d, s, nodes)
    p.ranks[1].client.close()
    assert s.one(p.control, Ended).lease is lease
    s.one(d.control, Ended)
    p.ranks[0].client.push(lease.ref, [Unit(ALL_LAYERS, 0, 1)])  # type: ignore[arg-type]
    assert s.one(p.ranks[0].client, PushRefused).code in (Code.LEASE_ENDED, Code.UNKNOWN_LEASE)


def bound(p: Engine, d: Engine, s: Steps, nodes: tuple[Node, Node]) -> tuple[Lease, Lease]:
    tk = ticket(*nodes)
    lease = p.control.present(tk, d.control.address, 16, [7])
    s.one(d.control, Presented)
    other = d.control.bind(tk, 0, [7])
    s.one(p.control, Bound)
    return lease, other


def test_the_daemon_of_members_is_killed(engines: tuple[Engine, Engine, Steps], nodes: tuple[Node, Node]) -> None:
    p, d, s = engines
    p.start()
    d.start()
    lease, other = bound(p, d, s, nodes)
    nodes[0].kill()
    assert s.one(p.control, Ended).lease is lease
    assert s.one(d.control, Ended).lease is other
    nodes[0].start()
    s.heard[id(d.control)].clear()
    transfer(p, d, s, ticket(*nodes))


def test_an_upgrade_under_members(engines: tuple[Engine, Engine, Steps], nodes: tuple[Node, Node]) -> None:
    p, d, s = engines
    p.start()
    d.start()
    lease, other = bound(p, d, s, nodes)
    want = [r.fill(7) for r in p.ranks]
    old = nodes[0].process
    nodes[0].start("--takeover")
    s.until(lambda: all(s.of(c, Draining) for c in p.clients()))
    s.until(lambda: all(s.of(c, Connected)[-1].epoch != lease.ref.epoch for c in p.clients() if s.of(c, Connected)))  # type: ignore[union-attr]
    transfer(p, d, s, ticket(*nodes))
    for r in p.ranks:
        r.client.push(lease.ref, [Unit(ALL_LAYERS, 0, 1)])  # type: ignore[arg-type]
    p.control.handoff(lease, b"")
    s.until(lambda: lease.over and other.over)
    assert [r.block(7) for r in d.ranks] == want
    assert not s.of(p.control, Ended)
    transfer(p, d, s, ticket(*nodes))
    s.until(lambda: old.poll() is not None)  # it closed the members' connections: they do not know which leases there are
    transfer(p, d, s, ticket(*nodes))
