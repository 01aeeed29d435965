"""A daemon of the test's own, which says what a real one never would."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import protocol
from headrace.client import Client
from headrace.events import Connected, Draining, Ended, Event, Lease, Lost, Opened, Refused, Withdrawn
from headrace.protocol import Code, Frame, Splitter, State, Type

TICKET = b"HRTK" + bytes(4) + bytes(range(0xA0, 0xB0)) + bytes(328)
NONCE = TICKET[8:24]


class Fake:
    """Listens in this process, so that its pidfd never says that it is gone."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "fake.sock")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(10)
        self.sock: socket.socket | None = None
        self.splitter = Splitter()

    def accept(self) -> None:
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(10)
        self.splitter = Splitter()

    def frame(self) -> Frame:
        assert self.sock is not None
        while True:
            for frame in self.splitter:
                return frame
            self.splitter.feed(self.sock.recv(65536))

    def say(self, kind: int, request: int, payload: bytes) -> None:
        assert self.sock is not None
        self.sock.sendall(protocol.frame(kind, request, payload))

    def greet(self, epoch: int = 7) -> None:
        f = self.frame()
        assert f.type == Type.HELLO
        self.say(Type.HELLO_OK, f.request, struct.pack("<HHIQIIIIHHI", 2, 0, 1, epoch, 2 << 20, 8, 500, 2500, 4, 0, 0) + b"fake")

    def event(self, kind: Type, lease: int = 0, nonce: bytes = NONCE, code: int = 0, text: str = "") -> None:
        self.say(kind, 0, protocol.EVENT.pack(lease, nonce, 0, 0, 0, 0, 0, len(text), code, 0) + text.encode())

    def close(self) -> None:
        for s in (self.sock, self.listener):
            with contextlib.suppress(OSError):
                if s is not None:
                    s.close()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    gc.collect()  # what other tests left to the collector it must not take in this one
    before = len(os.listdir("/proc/self/fd"))
    made = Fake(tmp_path)
    yield made
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors are left over"


@pytest.fixture
def client(fake: Fake) -> Iterator[Client]:
    made = Client(fake.path, "p", ring=False)
    assert made.step() == []
    fake.accept()
    fake.greet()
    made.wait_ready()
    assert [type(e) for e in made.step()] == [Connected]
    yield made
    made.close()


def until(client: Client, kind: type[Event]) -> list[Event]:
    heard: list[Event] = []
    limit = time.monotonic() + 10
    while not any(isinstance(e, kind) for e in heard):
        heard += client.step()
        assert time.monotonic() < limit, heard
    return heard


def opened(client: Client, fake: Fake) -> Lease:
    lease = client.present(TICKET, "", 16, [1])
    client.flush()
    f = fake.frame()
    assert f.type == Type.PRESENT
    fake.say(Type.OK, f.request, struct.pack("<Q", 3))
    assert isinstance(until(client, Opened)[-1], Opened)
    return lease


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "frames are lost"),
        (protocol.frame(0x99, 0, b""), "does not know"),
        (protocol.frame(Type.OK, 999, bytes(8)), "request 999, which is not open"),
        (protocol.frame(Type.BOUND, 0, bytes(3)), "BOUND of 3 bytes"),
        (protocol.HEADER.pack(b"HRU1", 2, 0, Type.OK, 1 << 30, 0, 1), "frames are lost"),
    ],
)
def test_garbage(client: Client, fake: Fake, garbage: bytes, why: str) -> None:
    """The connection is closed with the reason, and its leases wait for a fence."""
    lease = opened(client, fake)
    assert fake.sock is not None
    fake.sock.sendall(garbage)
    (lost,) = [e for e in until(client, Lost) if isinstance(e, Lost)]
    assert why in lost.text
    assert not lease.over
    assert not client.wait_over(lease, 0.02)
    fake.sock.close()
    fake.accept()  # it connected again at once
    fake.greet()  # the same life of the daemon: so all of before is fenced
    heard = until(client, Ended)
    assert [(e.lease, e.state) for e in heard if isinstance(e, Ended)] == [(lease, State.LOST)]


def test_another_life_says_nothing_of_the_first(client: Client, fake: Fake) -> None:
    lease = opened(client, fake)
    assert fake.sock is not None
    fake.sock.close()
    until(client, Lost)
    assert client.step() == []  # it connects again
    fake.accept()
    fake.greet(epoch=8)
    until(client, Connected)
    assert not client.wait_over(lease, 0.05)


def test_an_end_before_the_answer(client: Client, fake: Fake) -> None:
    lease = client.present(TICKET, "", 16, [1])
    client.flush()
    f = fake.frame()
    fake.event(Type.REFUSED, 3, code=State.REVOKED, text="no blocks")
    fake.say(Type.OK, f.request, struct.pack("<Q", 3))
    fake.event(Type.ENDED, 3, code=State.REVOKED)  # a second end is not told
    assert until(client, Refused) == [Refused(lease, None, "no blocks")]
    fake.event(Type.DRAINING, nonce=bytes(16))
    assert until(client, Draining) == [Draining(7)]


def test_moved_is_presented_to_the_successor(client: Client, fake: Fake) -> None:
    lease = opened(client, fake)
    client.extend(lease, [2])
    client.handoff(lease, b"r")
    client.flush()
    assert [fake.frame().type for _ in range(2)] == [Type.EXTEND, Type.HANDOFF]
    fake.event(Type.DRAINING, nonce=bytes(16))
    fake.event(Type.REFUSED, 3, code=State.MOVED)
    until(client, Draining)
    client.step()
    old = fake.sock
    fake.accept()
    fake.greet(epoch=8)
    until(client, Connected)
    f = fake.frame()
    assert f.type == Type.PRESENT
    assert f.payload == protocol.present(TICKET, "", 16, [1, 2], [])
    fake.say(Type.OK, f.request, struct.pack("<Q", 1))
    (again,) = until(client, Opened)
    assert again == Opened(lease)
    assert lease.ref == (8, 1)
    client.flush()
    f = fake.frame()
    assert (f.type, f.payload) == (Type.HANDOFF, protocol.handoff(1, b"r"))
    assert old is not None
    assert old.recv(1) == b""  # nothing is left there: it was closed
    old.close()


def test_a_ticket_recalled_before_it_was_presented(client: Client, fake: Fake) -> None:
    fake.event(Type.ENDED, 0, code=State.REVOKED, text="recalled")
    assert until(client, Withdrawn) == [Withdrawn(NONCE, "recalled")]


def test_requests_beyond_the_limit_wait_their_turn(client: Client, fake: Fake) -> None:
    """HELLO_OK allows 8 in flight, one of which is a PING's."""
    for i in range(20):
        client.present(TICKET[:8] + bytes([i]) * 16 + TICKET[24:], "", 16, [1])
    client.step()
    assert fake.sock is not None
    fake.sock.settimeout(0.05)
    got = []
    with contextlib.suppress(TimeoutError):
        while True:
            f = fake.frame()
            got += [f] if f.type == Type.PRESENT else []
    assert len(got) == 7
    for n, f in enumerate(got):
        fake.say(Type.OK, f.request, struct.pack("<Q", n + 1))
    fake.sock.settimeout(10)
    client.step()
    assert fake.frame().type in (Type.PRESENT, Type.PING)


def test_a_refused_revoke_ends_the_connection(client: Client, fake: Fake) -> None:
    lease = opened(client, fake)
    client.revoke(lease, "x")
    client.flush()
    f = fake.frame()
    assert f.type == Type.REVOKE
    fake.say(Type.ERROR, f.request, struct.pack("<HHI", Code.INTERNAL, 0, 0))
    assert "did not revoke" in str(until(client, Lost))
    assert not lease.over
