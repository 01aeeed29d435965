"""The client against real daemons."""

from __future__ import annotations

from headrace.events import Bound, Ended, Opened, Presented, Pushed, PushRefused, Refused, Settled, Withdrawn
from headrace.protocol import Code, State, Unit
from tests.conftest import Pair
from tests.nodes import ticket


def test_a_transfer(pair: Pair) -> None:
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    want = [pair.mem_p.fill(b, 1) for b in (5, 2, 7)]
    lease = pair.p.present(tk, pair.peer, 48, [5, 2, 7], b"meta")
    presented = s.one(pair.d, Presented)
    assert (presented.nonce, presented.tokens, presented.engine, presented.meta) == (lease.nonce, 48, "p", b"meta")
    assert presented.layouts == (pair.mem_p.layout,)
    bound = pair.d.bind(tk, 16, [0, 3, 1])
    assert s.one(pair.p, Opened).lease is lease
    assert s.one(pair.p, Bound).first_token == lease.first_token == 16
    assert lease.bound
    assert lease.ref is not None
    seq = pair.p.push(lease.ref, [Unit(0, 0, 3)])
    pair.p.handoff(lease, b"record")
    assert s.one(pair.d, Settled).record == b"record"
    assert s.one(pair.p, Settled).lease is lease
    assert s.one(pair.p, Pushed) == Pushed(lease.ref, seq)
    heard = [type(e) for e in s.heard[id(pair.p)]]
    assert heard.index(Pushed) < heard.index(Settled)
    assert lease.over
    assert bound.over
    assert [pair.mem_d.block(b) for b in (3, 1)] == want[1:]
    assert pair.mem_d.block(0) == bytes(pair.mem_d.block_bytes)


def test_refused_by_d(pair: Pair) -> None:
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    lease = pair.p.present(tk, pair.peer, 16, [1])
    s.one(pair.d, Presented)
    pair.d.refuse(tk, "no blocks")
    refused = s.one(pair.p, Refused)
    assert refused.lease is lease
    assert "no blocks" in refused.text
    assert lease.over


def test_revoked_by_p_unbound(pair: Pair) -> None:
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    lease = pair.p.present(tk, pair.peer, 16, [1])
    s.one(pair.d, Presented)
    pair.p.revoke(lease, "client left")
    assert pair.p.wait_over(lease, 5)
    assert s.one(pair.p, Ended).state is State.REVOKED
    assert s.one(pair.d, Withdrawn).nonce == lease.nonce


def test_revoked_by_d_bound(pair: Pair) -> None:
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    lease = pair.p.present(tk, pair.peer, 16, [1])
    s.one(pair.d, Presented)
    bound = pair.d.bind(tk, 0, [1])
    s.one(pair.p, Bound)
    pair.d.revoke(bound, "client left")
    assert pair.d.wait_over(bound, 5)
    assert s.one(pair.d, Ended).lease is bound
    assert "client left" in s.one(pair.p, Ended).text
    assert lease.over
    assert lease.ref is not None
    pair.p.push(lease.ref, [Unit(0, 0, 1)])
    assert s.one(pair.p, PushRefused).code in (Code.UNKNOWN_LEASE, Code.LEASE_ENDED)
