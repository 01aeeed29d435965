"""The client against real daemons."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.events import Bound, Ended, Opened, Presented, Pushed, PushRefused, Refused, Settled, Withdrawn
from headrace.protocol import ALL_LAYERS, Code, State, Unit
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


def test_chunk_by_chunk(pair: Pair) -> None:
    """Blocks follow as the prompt is computed; what is asked for before the lease has a name is sent once it has."""
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    want = [pair.mem_p.fill(b, 2) for b in (1, 2, 3, 4)]
    lease = pair.p.present(tk, pair.peer, 64, [1])
    pair.p.extend(lease, [2])
    s.one(pair.d, Presented)
    pair.d.bind(tk, 0, [4, 3, 2, 1])
    s.one(pair.p, Opened)
    assert lease.ref is not None
    pair.p.push(lease.ref, [Unit(ALL_LAYERS, 0, 2)])
    pair.p.extend(lease, [3])
    pair.p.extend(lease, [4])
    s.until(lambda: len(s.of(pair.p, Pushed)) == 1)
    pair.p.push(lease.ref, [Unit(ALL_LAYERS, 2, 2)])
    pair.p.handoff(lease, b"")
    s.one(pair.d, Settled)
    s.one(pair.p, Settled)
    assert [pair.mem_d.block(b) for b in (4, 3, 2, 1)] == want
    assert not s.of(pair.p, PushRefused)


def test_a_handoff_that_comes_too_early_ends_the_lease(pair: Pair) -> None:
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    lease = pair.p.present(tk, pair.peer, 64, [1])
    s.one(pair.d, Presented)
    pair.p.handoff(lease, b"")
    ended = s.one(pair.p, Ended)
    assert "the daemon refused to go on" in ended.text
    assert lease.over


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: t[:-1] + bytes([t[-1] ^ 1]), Code.BAD_TICKET),
        (lambda t: t[:8] + bytes(16) + t[24:], Code.BAD_TICKET),
    ],
)
def test_an_altered_ticket(pair: Pair, change: Callable[[bytes], bytes], code: Code) -> None:
    lease = pair.p.present(change(ticket(pair.node_p, pair.node_d)), pair.peer, 16, [1])
    refused = pair.steps.one(pair.p, Refused)
    assert (refused.lease, refused.code) == (lease, code)


def test_a_ticket_is_used_once(pair: Pair) -> None:
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    lease = pair.p.present(tk, pair.peer, 16, [1])
    with pytest.raises(ValueError, match="one attempt"):
        pair.p.present(tk, pair.peer, 16, [1])
    s.one(pair.d, Presented)
    pair.d.bind(tk, 0, [1])
    s.one(pair.p, Bound)
    pair.p.revoke(lease, "")
    s.one(pair.p, Ended)
    again = pair.p.present(tk, pair.peer, 16, [1])
    assert s.one(pair.p, Refused).lease is again


def test_bound_before_it_was_presented(pair: Pair) -> None:
    pair.d.bind(ticket(pair.node_p, pair.node_d), 0, [1])
    assert pair.steps.one(pair.d, Refused).code is Code.NOT_PRESENTED


def test_expired(pair: Pair) -> None:
    s = pair.steps
    lease = pair.p.present(ticket(pair.node_p, pair.node_d, seconds=0.3), pair.peer, 16, [1])
    s.one(pair.d, Presented)
    assert s.one(pair.p, Ended).state is State.EXPIRED
    assert lease.over
    s.one(pair.d, Withdrawn)


def test_many_pushes_than_a_ring_holds(pair: Pair) -> None:
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    want = pair.mem_p.fill(1, 3)
    lease = pair.p.present(tk, pair.peer, 16, [1])
    s.one(pair.d, Presented)
    pair.d.bind(tk, 0, [1])
    s.one(pair.p, Bound)
    assert lease.ref is not None
    seqs = [pair.p.push(lease.ref, [Unit(0, 0, 1)]) for _ in range(700)]
    s.until(lambda: len(s.of(pair.p, Pushed)) == len(seqs))
    assert sorted(e.seq for e in s.of(pair.p, Pushed)) == seqs
    pair.p.handoff(lease, b"")
    s.one(pair.d, Settled)
    assert pair.mem_d.block(1) == want


class Counted:
    """A socket whose system calls are counted."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.calls = sock, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name in ("sendmsg", "recv", "send", "sendall"):
            self.calls.append(name)
        return getattr(self._sock, name)


def test_a_step_is_one_sendmsg_and_one_look(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    s, tickets = pair.steps, [ticket(pair.node_p, pair.node_d) for _ in range(8)]
    s.until(lambda: not pair.p._current._conn._pending)  # type: ignore[union-attr]  # a PING of before
    conn = pair.p._current._conn  # type: ignore[union-attr]
    sock = conn._sock
    counted = Counted(sock)
    monkeypatch.setattr(conn, "_pinged", time.monotonic() + 60)
    monkeypatch.setattr(conn, "_sock", counted)
    assert pair.p.step() == []
    assert counted.calls == ["recv"]
    counted.calls.clear()
    leases = [pair.p.present(t, pair.peer, 16, [i]) for i, t in enumerate(tickets)]
    pair.p.step()
    assert counted.calls == ["sendmsg", "recv"]
    monkeypatch.setattr(conn, "_sock", sock)
    s.until(lambda: all(x.ref for x in leases))
    monkeypatch.setattr(conn, "_sock", counted)
    counted.calls.clear()
    for x in leases:
        assert x.ref is not None
        pair.p.push(x.ref, [Unit(0, 0, 1)])
    pair.p.step()
    by_ring = pair.p._current._ring is not None  # type: ignore[union-attr]
    assert counted.calls == (["recv"] if by_ring else ["sendmsg", "recv"])
    monkeypatch.setattr(conn, "_sock", sock)
