"""Leases that end at random moments."""

from __future__ import annotations

import random
import time

from headrace.events import OVER, Event, Lease, Opened, Presented, Settled
from headrace.protocol import Unit, nonce_of
from tests.conftest import Pair
from tests.nodes import LIMIT_S, ticket

CANCELS = 200


class Cancels:
    """Two engines that reuse each block the moment its lease is over, and look whether anything still lands in it."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.rng = pair, random.Random(20261121)
        self.tickets: dict[bytes, bytes] = {}
        self.living: list[Lease] = []  # P's
        self.bound: dict[bytes, Lease] = {}  # D's
        self.free_p, self.free_d = set(range(8)), set(range(8))
        self.guard: dict[int, bytes] = {}
        self.ends_p = self.ends_d = self.binds = self.settled = 0

    def present(self) -> None:
        while len(self.tickets) < CANCELS and self.free_p and len(self.living) < 6:
            tk = ticket(self.pair.node_p, self.pair.node_d)
            self.tickets[nonce_of(tk)] = tk
            lease = self.pair.p.present(tk, self.pair.peer, 16, [self.free_p.pop()])
            self.pair.mem_p.fill(lease.blocks[0], len(self.tickets))
            self.living.append(lease)

    def p(self, e: Event) -> None:
        if isinstance(e, Opened):
            assert e.lease.ref is not None
            self.pair.p.push(e.lease.ref, [Unit(0, 0, 1)])
            self.pair.p.handoff(e.lease, b"r")
        elif isinstance(e, OVER):
            self.living.remove(e.lease)  # ValueError: a second end
            self.pair.mem_p.fill(e.lease.blocks[0], 0)
            self.free_p.add(e.lease.blocks[0])
            self.ends_p += 1

    def d(self, e: Event) -> None:
        if isinstance(e, Presented):
            if self.rng.random() < 0.2 or not self.free_d:
                self.pair.d.refuse(self.tickets[e.nonce], "no")
                return
            block = self.free_d.pop()
            self.guard.pop(block, None)
            self.bound[e.nonce] = self.pair.d.bind(self.tickets[e.nonce], 0, [block])
            self.binds += 1
        elif isinstance(e, OVER):
            assert self.bound.pop(e.lease.nonce) is e.lease, "a second end"
            self.ends_d += 1
            self.settled += isinstance(e, Settled)
            block = e.lease.blocks[0]
            self.guard[block] = self.pair.mem_d.fill(block, 77)  # ours again: nothing may land in it
            self.free_d.add(block)

    def cancel(self) -> None:
        for leases, client in ((self.living, self.pair.p), (list(self.bound.values()), self.pair.d)):
            for lease in leases:
                # How often this is called meanwhile is a matter of the machine: some are left to settle.
                if lease.nonce[0] % 4 and self.rng.random() < 0.02:
                    client.revoke(lease, "cancelled")
        waited_for = [lease for lease in self.living if lease.nonce[0] % 4]
        if waited_for and self.rng.random() < 0.05:
            lease = self.rng.choice(waited_for)
            self.pair.p.revoke(lease, "cancelled, and waited for")
            assert self.pair.p.wait_over(lease, LIMIT_S)


def test_200_cancels_at_random(pair: Pair) -> None:
    """Whoever cancels, and whenever: each lease ends once on each side, and blocks are not touched behind the fence."""
    c, limit = Cancels(pair), time.monotonic() + 300
    while len(c.tickets) < CANCELS or c.living or c.bound:
        assert time.monotonic() < limit, (len(c.tickets), c.living, c.bound)
        c.present()
        for e in pair.p.step():
            c.p(e)
        for e in pair.d.step():
            c.d(e)
        for block, data in c.guard.items():
            assert pair.mem_d.block(block) == data, "bytes landed behind the fence"
        c.cancel()
    assert c.ends_p == CANCELS
    assert c.ends_d == c.binds > c.settled > 10
    assert c.free_p == c.free_d == set(range(8))
