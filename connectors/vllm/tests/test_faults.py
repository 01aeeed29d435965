"""Daemons that die, stop, give way or refuse, and memory that they do not take."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from headrace import osys
from headrace.client import Client, Refusal, Unavailable
from headrace.events import Bound, Connected, Draining, Ended, Lost, Opened, Presented, Refused, Settled, Withdrawn
from headrace.protocol import ALL_LAYERS, Code, State, Unit
from tests.conftest import Pair
from tests.nodes import LIMIT_S, Memory, Node, Steps, ticket


def test_no_socket(tmp_path: Path) -> None:
    client = Client(str(tmp_path / "none.sock"), "p")
    began = time.monotonic()
    with pytest.raises(Unavailable, match="is `headrace node` running on this host"):
        client.wait_ready(0.1)
    assert [type(e) for e in client.step()] == [Lost], "told once"
    assert client.step() == []
    assert time.monotonic() - began < LIMIT_S
    assert "no such socket" in client.problem
    client.close()


def test_a_socket_that_nobody_serves(nodes: tuple[Node, Node]) -> None:
    nodes[0].kill()
    client = Client(nodes[0].socket, "p")
    with pytest.raises(Unavailable, match="start it again"):
        client.wait_ready(0.1)
    client.close()


def test_an_id_that_is_taken(nodes: tuple[Node, Node]) -> None:
    first, second = Client(nodes[0].socket, "p"), Client(nodes[0].socket, "p")
    first.wait_ready()
    with pytest.raises(Refusal, match="is attached by process"):  # after the 5 s that an earlier connection is given
        second.wait_ready(9)
    first.close()
    second.wait_ready()  # at once: the daemon fences the first one's before it answers
    second.close()


@pytest.mark.parametrize("kind", ["not sealed", "too small", "no memfd", "layout"])
def test_memory_that_is_refused(nodes: tuple[Node, Node], tmp_path: Path, kind: str) -> None:
    mem, client, path = Memory(4), Client(nodes[0].socket, "p"), tmp_path / "file"
    fd, size, layout, code = mem.fd, mem.size, mem.layout, Code.REGION
    if kind == "not sealed":
        fd = os.memfd_create("open") if hasattr(os, "memfd_create") else osys.memfd("open", size)
        os.ftruncate(fd, size)
    elif kind == "too small":
        size *= 2
    elif kind == "no memfd":
        path.write_bytes(bytes(size))
        fd = os.open(path, os.O_RDWR)
    else:
        layout, code = Memory(8).layout, Code.LAYOUT
    client.lend(fd, size, layout)
    with pytest.raises(Refusal, match="lend memory") as refusal:
        client.wait_ready()
    assert refusal.value.code is code
    assert not client.ready
    client.take_back()
    client.lend(mem.fd, mem.size, mem.layout)
    client.wait_ready()
    client.close()


def test_a_memfd_is_no_dmabuf(nodes: tuple[Node, Node]) -> None:
    mem, client = Memory(4), Client(nodes[0].socket, "p")
    client.lend_dmabuf(mem.fd, mem.size, 0, 0x7F0000000000, mem.layout, device="0000:3b:00.0")
    with pytest.raises(Refusal) as refusal:
        client.wait_ready()
    assert refusal.value.code is Code.REGION
    client.take_back()
    client.lend(mem.fd, mem.size, mem.layout)  # as one that stages does then
    client.wait_ready()
    client.close()


def bound_pair(pair: Pair) -> tuple[bytes, object, object]:
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    lease = pair.p.present(tk, pair.peer, 16, [1])
    s.one(pair.d, Presented)
    bound = pair.d.bind(tk, 0, [1])
    s.one(pair.p, Bound)
    return tk, lease, bound


def test_ds_daemon_is_killed(pair: Pair) -> None:
    _, lease, bound = bound_pair(pair)
    s = pair.steps
    pair.node_d.kill()
    ended = s.one(pair.d, Ended)
    assert (ended.lease, ended.state) == (bound, State.LOST)
    assert s.one(pair.p, Ended).lease is lease
    assert s.of(pair.d, Lost)
    pair.node_d.start()
    s.until(lambda: s.of(pair.d, Connected))
    s.heard[id(pair.d)].clear()
    s.heard[id(pair.p)].clear()
    transfer(pair)


def transfer(pair: Pair) -> None:
    s, tk = pair.steps, ticket(pair.node_p, pair.node_d)
    want = pair.mem_p.fill(3, time.monotonic_ns())
    lease = pair.p.present(tk, pair.peer, 16, [3])
    s.until(lambda: [e for e in s.of(pair.d, Presented) if e.nonce == lease.nonce])
    pair.d.bind(tk, 0, [6])
    s.until(lambda: lease.ref is not None)
    assert lease.ref is not None
    pair.p.push(lease.ref, [Unit(ALL_LAYERS, 0, 1)])
    pair.p.handoff(lease, b"")
    s.until(lambda: [e for e in s.of(pair.d, Settled) if e.lease.nonce == lease.nonce])
    assert pair.mem_d.block(6) == want
    s.until(lambda: lease.over)


def test_ps_daemon_is_killed(pair: Pair) -> None:
    _, lease, bound = bound_pair(pair)
    s = pair.steps
    unbound = pair.p.present(ticket(pair.node_p, pair.node_d), pair.peer, 16, [2])
    s.until(lambda: len(s.of(pair.d, Presented)) == 2)
    pair.node_p.kill()
    s.until(lambda: len(s.of(pair.p, Ended)) == 2)
    assert {e.lease for e in s.of(pair.p, Ended)} == {lease, unbound}
    assert {e.state for e in s.of(pair.p, Ended)} == {State.LOST}
    assert s.one(pair.d, Ended).lease is bound
    assert s.one(pair.d, Withdrawn).nonce == unbound.nonce
    pair.node_p.start()
    s.heard[id(pair.d)].clear()
    transfer(pair)


def test_a_stopped_daemon_may_still_write(pair: Pair) -> None:
    """It is given up after its silence, but its leases' blocks are not safe until its process is gone."""
    _, lease, _ = bound_pair(pair)
    s = pair.steps
    pair.node_p.process.send_signal(signal.SIGSTOP)
    s.until(lambda: s.of(pair.p, Lost), "the daemon to be given up")
    assert "is it stopped?" in s.of(pair.p, Lost)[0].text
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        s.once()
    assert not s.of(pair.p, Ended)
    assert not pair.p.wait_over(lease, 0.1)  # type: ignore[arg-type]
    os.kill(pair.node_p.process.pid, signal.SIGKILL)
    ended = s.one(pair.p, Ended)
    assert (ended.lease, ended.state) == (lease, State.LOST)


def test_a_daemon_that_was_stopped_and_goes_on(pair: Pair) -> None:
    """The same process takes this engine back: that says that all of before is fenced."""
    _, lease, _ = bound_pair(pair)
    s = pair.steps
    epoch = lease.ref.epoch  # type: ignore[attr-defined]
    pair.node_p.process.send_signal(signal.SIGSTOP)
    s.until(lambda: s.of(pair.p, Lost), "the daemon to be given up")
    pair.node_p.process.send_signal(signal.SIGCONT)
    ended = s.one(pair.p, Ended)
    assert (ended.lease, ended.state) == (lease, State.LOST)
    assert s.one(pair.p, Connected).epoch == epoch
    s.heard[id(pair.d)].clear()
    transfer(pair)


def test_no_daemon_for_a_request(nodes: tuple[Node, Node]) -> None:
    client = Client(nodes[0].socket, "p", patience=0.2)
    client.wait_ready()
    s = Steps([client])
    nodes[0].kill()
    s.until(lambda: s.of(client, Lost))
    lease = client.present(ticket(*nodes), "", 16, [1])
    refused = s.one(client, Refused)
    assert refused.lease is lease
    assert "start it again" in refused.text
    client.revoke(lease, "late")
    assert client.step() == []
    client.close()


def test_upgrade_with_leases_under_way(pair: Pair) -> None:
    """P's daemon gives way: what is bound goes on at the old one, what is new goes to the new one, nothing is lost."""
    tk, lease, bound = bound_pair(pair)
    s, node = pair.steps, pair.node_p
    want = pair.mem_p.fill(1, 9)
    old = node.process
    node.start("--takeover")
    s.until(lambda: s.of(pair.p, Draining) and s.of(pair.p, Connected))
    assert s.one(pair.p, Connected).epoch != lease.ref.epoch  # type: ignore[attr-defined]
    transfer(pair)
    pair.p.push(lease.ref, [Unit(ALL_LAYERS, 0, 1)])  # type: ignore[attr-defined]
    pair.p.handoff(lease, b"old")  # type: ignore[arg-type]
    s.until(lambda: bound.over and lease.over)  # type: ignore[attr-defined]
    assert pair.mem_d.block(1) == want
    old.wait(20)  # since this engine closed its connection
    assert not s.of(pair.p, Ended)
    assert tk
    transfer(pair)


def test_upgrade_of_ds_daemon(pair: Pair) -> None:
    _, lease, bound = bound_pair(pair)
    s, node = pair.steps, pair.node_d
    unbound = ticket(pair.node_p, pair.node_d)
    waiting = pair.p.present(unbound, pair.peer, 16, [2])
    s.until(lambda: len(s.of(pair.d, Presented)) == 2)
    old = node.process
    node.start("--takeover")
    s.until(lambda: s.of(pair.d, Draining) and s.of(pair.d, Connected))
    late = pair.d.bind(unbound, 0, [2])  # presented to the old one: bound there
    s.until(lambda: late.bound)
    transfer(pair)
    for x, n in ((lease, 1), (waiting, 2)):
        want = pair.mem_p.fill(n, 10)
        pair.p.push(x.ref, [Unit(ALL_LAYERS, 0, 1)])  # type: ignore[attr-defined]
        pair.p.handoff(x, b"")  # type: ignore[arg-type]
        s.until(lambda x=x: x.over)  # type: ignore[misc]
        s.until(lambda n=n: (bound if n == 1 else late).over)  # type: ignore[misc,attr-defined]
        assert pair.mem_d.block(n) == want
    old.wait(20)
    transfer(pair)


def test_opened_is_told_again_when_a_lease_moved(pair: Pair) -> None:
    """D's daemon is away: P's takes the ticket, gives way before it could present it, and the client presents it anew."""
    s, node = pair.steps, pair.node_p
    pair.node_d.process.send_signal(signal.SIGSTOP)
    tk = ticket(pair.node_p, pair.node_d)
    want = [pair.mem_p.fill(b, 11) for b in (1, 2)]
    lease = pair.p.present(tk, pair.peer, 32, [1])
    first = s.one(pair.p, Opened).lease.ref
    pair.p.extend(lease, [2])
    node.start("--takeover")
    s.until(lambda: s.of(pair.p, Draining) and s.of(pair.p, Connected))
    pair.node_d.process.send_signal(signal.SIGCONT)
    s.until(lambda: s.of(pair.d, Presented))
    assert lease.ref is not None
    moved = lease.ref != first
    assert len(s.of(pair.p, Opened)) == 1 + moved
    pair.d.bind(tk, 0, [1, 2])
    pair.p.push(lease.ref, [Unit(ALL_LAYERS, 0, 2)])
    pair.p.handoff(lease, b"")
    s.one(pair.d, Settled)
    assert [pair.mem_d.block(b) for b in (1, 2)] == want
